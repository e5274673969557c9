int policy_act(const $type *observation)
{
    int best = 0;
    policy_head(observation, kept_values);
    for (int i = 1; i < POLICY_HEAD_SIZE; i++)
        best = kept_values[i] > kept_values[best] ? i : best;
    return best;
}
