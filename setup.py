# SPDX-License-Identifier: Apache-2.0
"""Builds topoep/_ops: one shared library of torch ops, compiled with ninja.

Environment variables (all optional):
    TOPOEP_CUDA       auto (default): kernels if torch is a CUDA build and nvcc fits it;
                      1: required, even with a CPU build of torch (a compile check); 0: left out
    TOPOEP_NCCL       auto, 1 or 0, likewise for what needs the headers of NCCL >= 2.29.2
    TOPOEP_CUDA_ARCH  comma-separated SM versions, default 80,90,100 (those that nvcc knows)
    CUDA_HOME         the toolkit to use        TOPOEP_NCCL_HOME  a folder with include/nccl.h
    MAX_JOBS          parallel compilations     CXX               the host compiler
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "tools"))

from toolchain import find_cuda_home, find_nccl, nvcc_archs, nvcc_version  # noqa: E402

CSRC = ROOT / "csrc"
DEFAULT_ARCHS = ("80", "90", "100")
# The oldest torch whose stable ABI the library uses; it then loads into every later one.
STABLE_ABI = "0x020b000000000000"


def choice(name):
    value = os.environ.get(name, "auto").lower()
    if value not in ("auto", "0", "1"):
        sys.exit(f"{name}={value!r}: expected auto, 0 or 1")
    return value


def decide_cuda():
    """Returns (toolkit or None, the reason in words)."""
    wanted = choice("TOPOEP_CUDA")
    if wanted == "0":
        return None, "TOPOEP_CUDA=0"
    home = find_cuda_home()
    torch_cuda = torch.version.cuda
    if home is None:
        asked = os.environ.get("CUDA_HOME")
        where = f"CUDA_HOME={asked}" if asked else "CUDA_PATH, /usr/local/cuda, PATH"
        reason = f"no bin/nvcc with include/cuda_runtime.h found ({where})"
    elif wanted == "auto" and torch_cuda is None:
        reason = "torch is a CPU build (TOPOEP_CUDA=1 compiles the kernels all the same)"
    elif torch_cuda and torch_cuda.split(".")[0] != nvcc_version(home).split(".")[0]:
        reason = f"nvcc is {nvcc_version(home)} but torch was built with CUDA {torch_cuda}"
    else:
        return home, f"nvcc {nvcc_version(home)}"
    if wanted == "1":
        sys.exit(f"TOPOEP_CUDA=1, but the kernels cannot be built: {reason}")
    return None, reason


def decide_nccl(cuda_home):
    """Returns (include folder or None, version, the reason in words)."""
    wanted = choice("TOPOEP_NCCL")
    if wanted == "0":
        return None, "", "TOPOEP_NCCL=0"
    found = find_nccl()
    if cuda_home is None:
        reason = "it needs the CUDA kernels, which are left out"
    elif found is None:
        reason = "no nccl.h with nccl_device.h (NCCL >= 2.29.2) found; set TOPOEP_NCCL_HOME"
    else:
        include, version = found
        return include, version, f"headers of NCCL {version}"
    if wanted == "1":
        sys.exit(f"TOPOEP_NCCL=1, but NCCL support cannot be built: {reason}")
    return None, "", reason


def decide_archs(cuda_home):
    known = nvcc_archs(cuda_home)
    asked = os.environ.get("TOPOEP_CUDA_ARCH")
    if not asked:
        return [arch for arch in DEFAULT_ARCHS if arch in known]
    archs = [arch.strip() for arch in asked.split(",") if arch.strip()]
    if not archs or any(re.sub(r"\D", "", arch) not in known for arch in archs):
        sys.exit(
            f"TOPOEP_CUDA_ARCH={asked!r}: nvcc {nvcc_version(cuda_home)} knows {', '.join(known)}"
        )
    return archs


def static_cudart(cuda_home):
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (cuda_home / folder / "libcudart_static.a").exists():
            return cuda_home / folder / "libcudart_static.a"
    sys.exit(f"{cuda_home} has no libcudart_static.a; install the CUDA runtime development files")


class Plan:
    """What is built and how: decided once, printed, and written into the library."""

    def __init__(self):
        self.cuda_home, cuda_reason = decide_cuda()
        self.nccl_include, nccl_version, nccl_reason = decide_nccl(self.cuda_home)
        self.archs = decide_archs(self.cuda_home) if self.cuda_home else []
        self.info = {
            "torch": torch.__version__,
            "cuda": nvcc_version(self.cuda_home) if self.cuda_home else "",
            "cuda_reason": cuda_reason,
            "cuda_arch": ",".join(self.archs),
            "nccl": nccl_version,
            "nccl_reason": nccl_reason,
        }
        print(
            f"topoep: CUDA kernels: {'yes' if self.cuda_home else 'no'} ({cuda_reason}); "
            f"NCCL: {'yes' if self.nccl_include else 'no'} ({nccl_reason})"
        )

    def sources(self):
        left_out = set()
        left_out |= set() if self.cuda_home else {"cuda_place", "ops_cuda", "ops_plane", "planes"}
        left_out |= set() if self.nccl_include else {"ops_nccl"}
        folders = ["cpu", "bindings"]
        folders += ["cuda"] if self.cuda_home else []
        folders += ["comm"] if self.nccl_include else []
        return [
            source
            for folder in folders
            for source in sorted((CSRC / folder).iterdir())
            if source.suffix in (".cpp", ".cu") and source.stem not in left_out
        ]

    def cxx_flags(self, build):
        torch_include = Path(torch.__file__).parent / "include"
        system = [torch_include, torch_include / "torch/csrc/api/include"]
        system += [self.cuda_home / "include"] if self.cuda_home else []
        system += [self.nccl_include] if self.nccl_include else []
        return [
            "-O3", "-g0", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
            "-fwrapv", "-Wall", "-Wextra", *(["-Werror"] if choice("TOPOEP_WERROR") == "1" else []),
            f"-DTORCH_TARGET_VERSION={STABLE_ABI}",
            f"-I{CSRC}", f"-I{build}", *(f"-isystem {folder}" for folder in system),
        ]  # fmt: skip

    def nvcc_flags(self):
        newest = self.archs[-1]
        return [
            "-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off",
            *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.archs),
            f"-gencode=arch=compute_{newest},code=compute_{newest}", f"-I{CSRC}",
            *([f"-isystem {self.nccl_include}"] if self.nccl_include else []),
        ]  # fmt: skip

    def link_flags(self):
        flags = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
        if self.cuda_home:
            flags += [str(static_cudart(self.cuda_home)), "-ldl", "-lrt", "-lpthread"]
            flags += ["-Wl,--exclude-libs,ALL"]
        return flags

    def ninja_file(self, build, output):
        cxx = os.environ.get("CXX", "c++")
        compile_tail = "-MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc"
        lines = [
            "ninja_required_version = 1.5",
            f"rule cxx\n  command = {cxx} {' '.join(self.cxx_flags(build))} -MMD {compile_tail}",
            f"rule link\n  command = {cxx} -shared $in {' '.join(self.link_flags())} -o $out",
        ]
        if self.cuda_home:
            nvcc = f"{self.cuda_home}/bin/nvcc {' '.join(self.nvcc_flags())}"
            lines.append(f"rule nvcc\n  command = {nvcc} -MD {compile_tail}")
        objects = []
        for source in self.sources():
            name = str(source.relative_to(CSRC)).replace("/", "_")
            objects.append(escape(build / f"{name}.o"))
            rule = "nvcc" if source.suffix == ".cu" else "cxx"
            lines.append(f"build {objects[-1]}: {rule} {escape(source)}")
        lines.append(f"build {escape(output)}: link {' '.join(objects)}")
        return "\n".join(lines) + "\n"


def escape(path):
    return str(path).replace("$", "$$").replace(":", "$:").replace(" ", "$ ")


class NinjaBuild(build_ext):
    """Writes a build.ninja and runs it.

    torch.utils.cpp_extension is not used: it refuses .cu files with a CPU build of torch and
    compiles against headers that take half a minute a file; the stable ABI takes one second.
    """

    def build_extension(self, ext):
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        plan = Plan()
        # The build facts reach the compiler through a header, which needs no shell quoting. It is
        # written only when they change, so that nothing is compiled again for the same facts.
        header = build / "build_info.h"
        text = f"#define TOPOEP_BUILD_INFO {json.dumps(json.dumps(plan.info))}\n"
        if not header.exists() or header.read_text() != text:
            header.write_text(text)
        (build / "build.ninja").write_text(plan.ninja_file(build, output))
        asked = os.environ.get("MAX_JOBS", "")
        if asked and not (asked.isdecimal() and int(asked) > 0):
            sys.exit(f"MAX_JOBS={asked!r}: expected a positive number of compilations")
        jobs = ["-j", asked] if asked else []
        subprocess.run(["ninja", "-C", str(build), *jobs], check=True)


setup(ext_modules=[Extension("topoep._ops", sources=[])], cmdclass={"build_ext": NinjaBuild})
