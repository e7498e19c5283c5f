"""Data sets of images and measurements, addressed by id."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "data",
            "dead-leaves",
            "blt_builtins.data.dead_leaves:DeadLeaves",
            "Generated images of overlapping discs; no download, any number, any size.",
        ),
        Component(
            "data",
            "photos",
            "blt_builtins.data.photos:Photos",
            "Photographs that come with scikit-image (CC0 or public domain); for evaluation.",
        ),
        Component(
            "data",
            "array",
            "blt_builtins.data.array:Array",
            "Your own images from a NumPy file, N×H×W×3 or N×H×W.",
        ),
        Component(
            "data",
            "folder",
            "blt_builtins.data.folder:Folder",
            "Your own image files from a folder, of any ordinary format; read when needed.",
        ),
        Component(
            "data",
            "pairs",
            "blt_builtins.data.pairs:Pairs",
            "Your own measurements, recorded, with or without true images; files or arrays.",
        ),
        Component(
            "data",
            "simulated",
            "blt_builtins.data.simulated:Simulated",
            "Images measured by another operator than the recipe's; to see what a wrong model costs.",
        ),
        Component(
            "data",
            "variants",
            "blt_builtins.data.variants:Variants",
            "Images of other data, in tiles, turned, mirrored and at other contrasts, for training.",
        ),
        Component(
            "data",
            "stl10",
            "blt_builtins.data.stl10:STL10",
            "STL-10: 113,000 colour images 96×96; downloaded on request.",
        ),
        Component(
            "data",
            "oxford-pets",
            "blt_builtins.data.pets:OxfordPets",
            "Oxford-IIIT Pet: 7,349 photographs of cats and dogs; downloaded on request.",
        ),
    ]
