"""The optional compiled CPU kernels. A failed build leaves a package that runs on plain torch."""

import glob
from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup

SOURCES = "src/quire/kernels/cpu/csrc"
DIGEST = run_path("src/quire/kernels/cpu/shared_object.py")["digest"](Path(SOURCES))

setup(
    ext_modules=[
        Extension(
            "quire.kernels.cpu._native",
            sources=sorted(glob.glob(f"{SOURCES}/*.cpp")),
            depends=sorted(glob.glob(f"{SOURCES}/*.h")),
            define_macros=[("QUIRE_SOURCES", f'"{DIGEST}"')],
            # Instruction sets are chosen file by file and at run time: the binary runs on any CPU of the architecture.
            # No contraction: the same sum must give the same bits in every loop it is written in.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fvisibility=hidden",
                "-fno-math-errno",
                "-ffp-contract=off",
                "-Wno-psabi",
            ],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
            language="c++",
        )
    ]
)
