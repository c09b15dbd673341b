"""See what a hunter thinks: games of a checkpoint in the browser, and in each step what every learner believes.

    python evaluation/inspect.py runs/RUN                                  # writes inspect_<seats>.html beside it
    python evaluation/inspect.py runs/RUN --games 8 --seed 1 --out inspect.html
    python evaluation/inspect.py runs/RUN --seats learner,nearest_stag,nearest_hare,random
    python evaluation/inspect.py runs/RUN --script my_copy.py -- --planner none    # flags of the script

The work is done by `inspector.py`. This file is only its command: whoever runs a script of this folder finds it where
Python looks for the module `inspect`, so under that name it hands out the standard library's.
"""

import sys

if __name__ == "__main__":
    import inspector

    inspector.game.command_line(inspector.parse_args, inspector.main)

if __name__ == "inspect":
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    own_folder = os.path.dirname(os.path.realpath(__file__))
    elsewhere = [path for path in sys.path if os.path.realpath(path) != own_folder]
    spec = PathFinder.find_spec("inspect", elsewhere)
    sys.modules["inspect"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["inspect"])
