/* quarl export LunarLander-v3/ppo/int8 --target c
   gcc -std=c99 -O2 main.c int8.c    (beside int8.c) */
#include <stdio.h>
#include "int8.h"

int main(void)
{
    float observation[POLICY_OBSERVATION_SIZE], head[POLICY_HEAD_SIZE];
    while (fread(observation, sizeof observation, 1, stdin) == 1) {
        policy_head(observation, head);
        printf("%d %g %g\n", policy_act(observation), head[0], head[1]);
    }
    return 0;
}
