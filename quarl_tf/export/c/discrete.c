int policy_act(const $type *observation)
{
    int best = 0;
    policy_head(observation, last_head);
    for (int i = 1; i < POLICY_HEAD_SIZE; i++)
        best = last_head[i] > last_head[best] ? i : best;
    return best;
}
