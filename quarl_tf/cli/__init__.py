"""The command `quarl`."""

import os
import sys
from collections.abc import Sequence

#: Extras by a module that each of them brings; what is not here comes with `train`.
_EXTRAS = {
    **dict.fromkeys(("argcomplete", "gymnasium", "packaging", "rich", "scipy", "yaml"), "evaluate"),
    **dict.fromkeys(("jinja2", "matplotlib", "pandas", "PIL", "seaborn"), "report"),
    "mcufit": "boards",
    "pygame": "video",
    "ray": "cluster",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    try:
        if "_ARGCOMPLETE" in os.environ:  # A shell asks what could follow.
            import argcomplete

            from quarl_tf.cli import arguments

            argcomplete.autocomplete(arguments.build())
        from quarl_tf.cli import verbs

        return verbs.main(words)
    except KeyboardInterrupt:  # Before the verb runs, while modules are imported.
        print("quarl: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        advice = (
            "this needs more than acting does; install it in the folder of quarl_tf: "
            f"pip install '.[{_EXTRAS.get(name, 'train')}]'"
        )
        if name == "ai_edge_litert":
            advice = (
                "commands need ai-edge-litert, which this platform may lack; where it does, act "
                "from Python (quarl_tf.Policy)"
            )
        print(f"quarl: {advice}. Received: no module {name!r}", file=sys.stderr)
        return 1
