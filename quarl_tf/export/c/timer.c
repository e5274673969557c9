/* Behind the header of a policy, with TYPE that of its observations, which come by the standard
 * input: nanoseconds of policy_head, one line a call, after 100 calls that are not timed. */
#include <stdio.h>
#include <time.h>

int main(void)
{
    static TYPE observation[POLICY_OBSERVATION_SIZE];
    static float head[POLICY_HEAD_SIZE];
    struct timespec start, end;
    int unready = 100;
    while (fread(observation, sizeof observation, 1, stdin) == 1) {
        for (; unready > 0; unready--)
            policy_head(observation, head);
        clock_gettime(CLOCK_MONOTONIC, &start);
        policy_head(observation, head);
        clock_gettime(CLOCK_MONOTONIC, &end);
        printf("%ld\n", 1000000000L * (end.tv_sec - start.tv_sec) + end.tv_nsec - start.tv_nsec);
    }
    return 0;
}
