/*
 * Written by quarl_tf of $run_id in $scheme.
 * environment  $env_id
 * algorithm    $algo
 * flatbuffer   sha256 $sha256
 * observation  $observation_size of $type; codes: $first
 * head         $head_size of $head; codes: $last
 * $summary
 * Static buffers: one call at a time. $numbers
 */
#ifndef POLICY_H
#define POLICY_H
#include <stdint.h>

#define POLICY_OBSERVATION_SIZE $observation_size
#define POLICY_HEAD_SIZE $head_size

#ifdef __cplusplus
extern "C" {
#endif
/* The network's output for one observation as the environment gives it. NaN is not refused: it
 * counts as one end of its number's range, so check sensors before. */
void policy_head(const $type *observation, $number *head);
/* The greedy action: the first of the best, or each number within its bounds. */
$prototype;
#ifdef __cplusplus
}
#endif
#endif
