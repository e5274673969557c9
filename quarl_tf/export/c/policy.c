/* Written by quarl_tf of $run_id in $scheme, sha256 $sha256: see the header. */
#include "$stem.h"
#include $include

$declarations

void policy_head(const $type *observation, $number *head)
{
$body
}

$act
