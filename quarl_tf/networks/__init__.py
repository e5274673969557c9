"""Policy networks and how they are evaluated."""

from quarl_tf.networks.build import (
    NAME,
    Design,
    NetworkFactory,
    Weights,
    action_head,
    actor_factory,
    critic_factory,
    load_weights,
    policy_factory,
    save_weights,
    set_weights,
    weights,
)

__all__ = [
    "NAME",
    "Design",
    "NetworkFactory",
    "Weights",
    "action_head",
    "actor_factory",
    "critic_factory",
    "load_weights",
    "policy_factory",
    "save_weights",
    "set_weights",
    "weights",
]
