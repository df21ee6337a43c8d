"""The optional compiled CPU kernels. A failed build leaves a package that runs on plain torch."""

import glob
import os
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = "src/quire/kernels/cpu/csrc"
DIGEST = run_path("src/quire/kernels/cpu/source_digest.py")["digest"](Path(SOURCES))

# One wheel serves 3.11 and all later: the module, called through ctypes, keeps to the stable ABI (module.cpp says so
# itself). Interpreters without a GIL have no such ABI, and get a wheel of their own.
ABI3 = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp311"}}


class ParallelBuild(build_ext):
    """Compiles as many source files at a time as there are cores; setuptools would take one after the other."""

    def build_extensions(self) -> None:
        compile_one, link = self.compiler._compile, self.compiler.link_shared_object
        started: list[Future] = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:

            def link_when_compiled(*args, **options) -> None:
                for each in started:
                    each.result()
                link(*args, **options)

            self.compiler._compile = lambda *args: started.append(pool.submit(compile_one, *args))
            self.compiler.link_shared_object = link_when_compiled
            super().build_extensions()


setup(
    options=ABI3,
    cmdclass={"build_ext": ParallelBuild},
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
                "-g0",
                "-fvisibility=hidden",
                "-fno-math-errno",
                "-ffp-contract=off",
                "-Wno-psabi",
            ],
            extra_link_args=["-pthread"],
            py_limited_api=bool(ABI3),
            optional=True,
            language="c++",
        )
    ]
)
