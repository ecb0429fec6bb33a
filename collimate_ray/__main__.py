"""``python -m collimate_ray``: the same as the ``collimate-ray`` command. Must hold no logic of its own."""

import sys

from collimate_ray.cli import main

if __name__ == "__main__":
    sys.exit(main())
