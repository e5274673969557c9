void policy_act(const $type *observation, $number *action)
{
    policy_head(observation, action);
    for (int i = 0; i < POLICY_HEAD_SIZE; i++) {
        action[i] = action[i] < action_low[i] ? action_low[i] : action[i];
        action[i] = action[i] > action_high[i] ? action_high[i] : action[i];
    }
}
