/* A board whose serial port is the standard input and output. */
#include <stdio.h>
static int waiting;
struct {
    void begin(long) {}
    int available() { return waiting != EOF; }
    int read() { int next = waiting; waiting = getchar(); return next; }
    void print(int number) { printf("%d", number); }
    void print(const char *text) { printf("%s", text); }
    void println(unsigned long number) { printf("%lu\n", number); }
    void println(const char *text) { printf("%s\n", text); }
} static Serial;
unsigned long micros() { return 0; }
void setup();
void loop();
int main() { setup(); for (waiting = getchar(); waiting != EOF;) loop(); }
