"""Reward hooks for trainers, one file a trainer; shipped as ``collimate_ray.adapters``.

The folder stands at the top level of the repository and is importable only under its shipped name: a bare ``adapters``
is another package in this field.
"""

if __name__ == "adapters":
    raise ImportError("import collimate_ray.adapters: a bare 'adapters' is another package")
