/* For each observation of standard input the head, and the action as one number or more. */
#include <stdio.h>
#include HEADER
static TYPE observation[POLICY_OBSERVATION_SIZE];
static NUMBER head[POLICY_HEAD_SIZE], action[POLICY_HEAD_SIZE];
int main(void)
{
    while (fread(observation, sizeof observation, 1, stdin) == 1) {
        policy_head(observation, head);
        ACT;
        fwrite(head, sizeof head, 1, stdout);
        fwrite(action, sizeof action, 1, stdout);
    }
    return 0;
}
