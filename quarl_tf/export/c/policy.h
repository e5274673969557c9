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
#ifndef POLICY_${tag}_H
#define POLICY_${tag}_H
#ifdef POLICY_HEAD_SIZE
#error "Include the header of one policy in a file; their names are the same."
#endif
#include <stdint.h>

/* What the linker sees, so that a program may have several policies. */
#define policy_head policy_head_$tag
#define policy_act policy_act_$tag

#define POLICY_OBSERVATION_SIZE $observation_size
#define POLICY_HEAD_SIZE $head_size

#ifdef __cplusplus
extern "C" {
#endif
/* The network's output for one observation as the environment gives it.$caution */
void policy_head(const $type *observation, $number *head);
/* The greedy action: the first of the best, or each number within its bounds. */
$prototype;
#ifdef __cplusplus
}
#endif
#endif
