# SPDX-License-Identifier: Apache-2.0
"""Builds topoep/_ops: one shared library of torch ops, compiled with ninja.

Environment variables (all optional):
    TOPOEP_CUDA       auto (default): kernels if torch is a CUDA build and a matching nvcc is found;
                      1: required, also with a CPU build of torch (a full compile check); 0: left out
    TOPOEP_NCCL       auto, 1 or 0, likewise for what needs the headers of NCCL >= 2.28
    TOPOEP_CUDA_ARCH  comma-separated SM versions, default 80,90,100 (those that nvcc knows)
    CUDA_HOME         the toolkit to use        TOPOEP_NCCL_HOME  a folder with include/nccl.h
    MAX_JOBS          parallel compilations     CXX               the host compiler
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CSRC = "csrc"
DEFAULT_ARCHS = ("80", "90", "100")
# The oldest torch whose stable ABI the library uses; it then loads into every later one.
STABLE_ABI = "0x020b000000000000"


def choice(name):
    value = os.environ.get(name, "auto").lower()
    if value not in ("auto", "0", "1"):
        sys.exit(f"{name}={value!r}: expected auto, 0 or 1")
    return value


def nvidia_wheel_folders():
    """site-packages/nvidia, where torch's CUDA wheels unpack themselves."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in (spec.submodule_search_locations if spec else [])]


def find_cuda_home():
    """A toolkit needs both the compiler and the headers; an nvcc on the PATH may be a wrapper."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates += [folder / "cu13" for folder in nvidia_wheel_folders()]
    if shutil.which("nvcc"):
        candidates.append(Path(shutil.which("nvcc")).resolve().parent.parent)
    for home in filter(None, candidates):
        home = Path(home)
        if os.access(home / "bin/nvcc", os.X_OK) and (home / "include/cuda_runtime.h").exists():
            return home
    return None


def nvcc_output(home, flag):
    result = subprocess.run([home / "bin/nvcc", flag], capture_output=True, text=True, check=True)
    return result.stdout


def nvcc_version(home):
    return re.search(r"release (\d+\.\d+)", nvcc_output(home, "--version")).group(1)


def decide_cuda():
    """Returns (toolkit or None, the reason in words)."""
    wanted = choice("TOPOEP_CUDA")
    if wanted == "0":
        return None, "TOPOEP_CUDA=0"
    home = find_cuda_home()
    if home is None:
        reason = "no nvcc with headers found (CUDA_HOME, /usr/local/cuda, PATH)"
    elif wanted == "auto" and torch.version.cuda is None:
        reason = "torch is a CPU build (TOPOEP_CUDA=1 compiles the kernels all the same)"
    elif torch.version.cuda and torch.version.cuda.split(".")[0] != nvcc_version(home).split(".")[0]:
        reason = f"nvcc is {nvcc_version(home)} but torch was built with CUDA {torch.version.cuda}"
    else:
        return home, f"nvcc {nvcc_version(home)}"
    if wanted == "1":
        sys.exit(f"TOPOEP_CUDA=1, but the kernels cannot be built: {reason}")
    return None, reason


def find_nccl():
    """Returns (include folder, version) of an NCCL with the device API, or (None, None)."""
    candidates = [os.environ.get("TOPOEP_NCCL_HOME")]
    candidates += [folder / "nccl" for folder in nvidia_wheel_folders()]
    candidates.append("/usr")
    for home in filter(None, candidates):
        include = Path(home) / "include"
        if (include / "nccl.h").exists() and (include / "nccl_device.h").exists():
            text = (include / "nccl.h").read_text()
            parts = dict(re.findall(r"#define NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
            return include, "{MAJOR}.{MINOR}.{PATCH}".format(**parts)
    return None, None


def decide_nccl(cuda_home):
    """Returns (include folder or None, version, the reason in words)."""
    wanted = choice("TOPOEP_NCCL")
    if wanted == "0":
        return None, "", "TOPOEP_NCCL=0"
    include, version = find_nccl()
    if cuda_home is None:
        reason = "it needs the CUDA kernels, which are left out"
    elif include is None:
        reason = "no nccl.h with nccl_device.h (NCCL >= 2.28) found; set TOPOEP_NCCL_HOME"
    else:
        return include, version, f"headers of NCCL {version}"
    if wanted == "1":
        sys.exit(f"TOPOEP_NCCL=1, but NCCL support cannot be built: {reason}")
    return None, "", reason


def decide_archs(cuda_home):
    listed = re.findall(r"compute_(\d+)", nvcc_output(cuda_home, "--list-gpu-arch"))
    asked = os.environ.get("TOPOEP_CUDA_ARCH")
    if not asked:
        return [arch for arch in DEFAULT_ARCHS if arch in listed]
    archs = [arch.strip() for arch in asked.split(",") if arch.strip()]
    unknown = [arch for arch in archs if re.sub(r"\D", "", arch) not in listed]
    if unknown or not archs:
        sys.exit(
            f"TOPOEP_CUDA_ARCH={asked!r}: nvcc {nvcc_version(cuda_home)} knows {', '.join(listed)}"
        )
    return archs


def static_cudart(cuda_home):
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (cuda_home / folder / "libcudart_static.a").exists():
            return cuda_home / folder / "libcudart_static.a"
    sys.exit(f"{cuda_home} has no libcudart_static.a; install the CUDA runtime development files")


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
        (build / "build.ninja").write_text(ninja_file(build, output))
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        subprocess.run(["ninja", "-C", str(build), *jobs], check=True)


def ninja_file(build, output):
    cuda_home, cuda_reason = decide_cuda()
    nccl_include, nccl_version, nccl_reason = decide_nccl(cuda_home)
    archs = decide_archs(cuda_home) if cuda_home else []
    info = {
        "torch": torch.__version__,
        "cuda": nvcc_version(cuda_home) if cuda_home else "",
        "cuda_reason": cuda_reason,
        "cuda_arch": ",".join(archs),
        "nccl": nccl_version,
        "nccl_reason": nccl_reason,
    }
    print(f"topoep: CUDA kernels: {'yes' if cuda_home else 'no'} ({cuda_reason}); "
          f"NCCL: {'yes' if nccl_include else 'no'} ({nccl_reason})")
    # The build facts reach the compiler through a header, which needs no shell quoting.
    literal = json.dumps(json.dumps(info))
    (build / "build_info.h").write_text(f"#define TOPOEP_BUILD_INFO {literal}\n")

    left_out = {"ops_cuda"} if not cuda_home else set()
    left_out |= {"ops_nccl"} if not nccl_include else set()
    folders = ["cpu", "bindings"]
    folders += ["cuda"] if cuda_home else []
    folders += ["comm"] if nccl_include else []
    sources = [
        source
        for folder in folders
        for source in sorted((ROOT / CSRC / folder).iterdir())
        if source.suffix in (".cpp", ".cu") and source.stem not in left_out
    ]
    torch_root = Path(torch.__file__).parent
    includes = [ROOT / CSRC, build]
    system = [torch_root / "include", torch_root / "include/torch/csrc/api/include"]
    system += [cuda_home / "include"] if cuda_home else []
    system += [nccl_include] if nccl_include else []
    flags = ["-O3", "-g0", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
             "-fwrapv", "-Wall", "-Wextra", f"-DTORCH_TARGET_VERSION={STABLE_ABI}"]
    flags += [f"-I{i}" for i in includes] + [f"-isystem {i}" for i in system]
    nvcc_flags = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off"]
    nvcc_flags += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    nvcc_flags += [f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"] if archs else []
    nvcc_flags += [f"-I{i}" for i in includes]
    link = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    if cuda_home:
        link += [str(static_cudart(cuda_home)), "-ldl", "-lrt", "-lpthread",
                 "-Wl,--exclude-libs,ALL"]

    lines = [
        "ninja_required_version = 1.5",
        "rule cxx",
        f"  command = {os.environ.get('CXX', 'c++')} -MMD -MF $out.d {' '.join(flags)} -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {os.environ.get('CXX', 'c++')} -shared $in {' '.join(link)} -o $out",
    ]
    if cuda_home:
        lines += [
            "rule nvcc",
            f"  command = {cuda_home}/bin/nvcc -MD -MF $out.d {' '.join(nvcc_flags)} -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]
    objects = []
    for source in sources:
        name = source.relative_to(ROOT / CSRC)
        objects.append(escape(build / f"{str(name).replace('/', '_')}.o"))
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        lines.append(f"build {objects[-1]}: {rule} {escape(source)}")
    lines += [f"build {escape(output)}: link {' '.join(objects)}", f"default {escape(output)}"]
    return "\n".join(lines) + "\n"


def escape(path):
    return str(path).replace("$", "$$").replace(":", "$:").replace(" ", "$ ")


setup(ext_modules=[Extension("topoep._ops", sources=[])], cmdclass={"build_ext": NinjaBuild})
