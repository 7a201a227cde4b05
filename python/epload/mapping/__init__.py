"""Maps checkpoint keys and layouts to a model's parameters and buffers.

``mapping="auto"``, the default of a load, is :func:`from_model`. Pass a :class:`Mapping` where names or layouts differ::

    from epload.mapping import Concatenate, Convert, Mapping, Rename, Stack

    mapping = Mapping(
        renames=(Rename(r"^transformer\\.h\\.", "model.layers."),),
        converts=(
            # experts.0.gate.weight, experts.0.up.weight, experts.1.gate.weight, ... -> experts.gate_up
            Convert(
                (r"experts\\.(?P<index>\\d+)\\.gate\\.weight$", r"experts\\.(?P<index>\\d+)\\.up\\.weight$"),
                ("experts.gate_up",),
                (Stack(0), Concatenate(1)),
            ),
        ),
    )
    epload.load(model, "checkpoint/", mapping=mapping)
"""

from epload.mapping.mapping import Convert, Mapping, Rename
from epload.mapping.operations import Concatenate, Operation, Reshape, Split, Stack, Transpose, Unstack
from epload.mapping.quantize import Quantize
from epload.mapping.resolve import from_model

__all__ = [
    "Concatenate",
    "Convert",
    "Mapping",
    "Operation",
    "Quantize",
    "Rename",
    "Reshape",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
    "from_model",
]
