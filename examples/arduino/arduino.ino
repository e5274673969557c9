// Acts on observations from the serial port: a line of eight numbers in, an action and its time out.
// First `quarl export LunarLander-v3/ppo/int8 --target c`, and copy int8.c and int8.h in here.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "int8.h"

static char line[256];
static size_t length = 0;

void setup() { Serial.begin(115200); }

// Reads the numbers of a whole line; anything else is no observation.
static bool read_line(float *observation) {
  char *at = line, *end = line;
  for (int i = 0; i < POLICY_OBSERVATION_SIZE; i++, at = end) {
    observation[i] = (float)strtod(at, &end);
    if (end == at || !isfinite(observation[i])) return false;
  }
  return at[strspn(at, " \t\r")] == '\0';
}

void loop() {
  if (!Serial.available()) return;
  const char next = (char)Serial.read();
  if (next != '\n') {
    if (length < sizeof line) line[length++] = next;
    return;
  }
  const bool fits = length < sizeof line;
  line[fits ? length : 0] = '\0';
  length = 0;
  float observation[POLICY_OBSERVATION_SIZE];
  if (!read_line(observation)) {
    Serial.println("?");
    return;
  }
  const unsigned long start = micros();
  const int action = policy_act(observation);
  const unsigned long taken = micros() - start;
  Serial.print(action);
  Serial.print(" in us: ");
  Serial.println(taken);
}
