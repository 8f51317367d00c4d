"""The models under one interface: `build`, `load`, `count_parameters`; the comparison models are in
`bitimely_core.zoo`.

A model's `forward(batch, *, directions=None, hide=None, attention=False)` returns `Encoded`, always
in forward time order.
"""

import gc

_collects = gc.isenabled()
# to look for garbage again and again while torch and pydantic are loaded takes a fifth of the
# import, and finds none
gc.disable()
try:
    from bitimely_core.models.base import Model
    from bitimely_core.models.factory import (
        DEFAULT_SHAPES,
        build,
        count_configured,
        count_parameters,
        default_shape,
        from_config,
        load,
        load_weights,
        match_parameters,
        read_config,
        read_model,
    )
    from bitimely_core.models.stream import open_stream

finally:
    if _collects:
        gc.enable()

__all__ = [
    "DEFAULT_SHAPES",
    "Model",
    "build",
    "count_configured",
    "count_parameters",
    "default_shape",
    "from_config",
    "load",
    "load_weights",
    "match_parameters",
    "open_stream",
    "read_config",
    "read_model",
]
