# SPDX-License-Identifier: Apache-2.0
"""Refuses a wheel that nobody should be given: python scripts/check_wheel.py [OPTIONS] WHEEL

Looked at: the list of files, RECORD, metadata, licences, list of components (SBOM), size, and of
each library what it needs: libraries, search path and versions of symbols. The wheel's platform tag
must promise no older system than these versions allow; --retag writes the right one first (it needs
the wheel package).
"""

import argparse
import base64
import csv
import email.parser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from index_page import CODE, LINK

ROOT = Path(__file__).resolve().parents[1]
MEGABYTES = 40  # unpacked, with the kernels of all architectures

# What each manylinux policy has besides its version of glibc, from auditwheel's list for x86_64.
POLICIES = {
    (2, 28): {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    (2, 31): {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    (2, 34): {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)},
    (2, 35): {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    (2, 36): {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    (2, 38): {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    (2, 39): {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
    (2, 41): {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}
MACHINES = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}

# They come with PyTorch, the driver or the system; a second copy in one process is a fault.
FOREIGN = re.compile(
    r"lib(?:torch|c10|shm|cu|nv|nccl|gomp|iomp|omp|mpi|pmix|stdc\+\+|gcc_s|c|m)[-_.\w]*\.so[.\d]*"
)
LICENSES = ("LICENSE", "NOTICE", "THIRD_PARTY_NOTICES")
SBOM = "sboms/syncbn.cdx.json"
# A text of the CUDA runtime, which is thus linked statically.
CUDART = b"CUDA driver version is insufficient for CUDA runtime version"
LIBRARIES = ("libsyncbn.so", "libsyncbn_torch_cpu.so")
CUDA_LIBRARY = "libsyncbn_torch_cuda.so"
CMAKE = ("-config.cmake", "-config-version.cmake", "-targets.cmake", "-targets-release.cmake")
# Before glibc 2.34 threads and dlopen were libraries of their own.
SYSTEM = r"(?:libstdc\+\+|libm|libgcc_s|libc|libpthread|libdl|librt|ld-linux\S*)\.so\S*"
# The CUDA runtime is linked statically and the driver opened when it is needed.
NEEDED = {
    "libsyncbn.so": SYSTEM,
    "libsyncbn_torch_cpu.so": rf"{SYSTEM}|libsyncbn\.so|libtorch(?:_cpu)?\.so",
    CUDA_LIBRARY: rf"{SYSTEM}|libsyncbn\.so|libtorch(?:_cpu|_cuda)?\.so",
}
REQUIRES = ["torch>=2.11", "greenlet<4,>=3.1"]


def expected_files(info: str, cuda: bool) -> set[str]:
    """The wheel's files; info is its dist-info folder."""
    sources = ROOT / "python" / "syncbn"
    modules = [path for path in sources.rglob("*") if path.suffix in (".py", ".pyi")]
    modules += [*sources.glob("py.typed"), sources / "_build.py"]
    headers = (*ROOT.glob("include/syncbn/*"), *ROOT.glob("bindings/libtorch/syncbn/*"))
    libtorch = ROOT / "bindings" / "libtorch" / "cmake"
    cmake = (path.relative_to(libtorch) for path in libtorch.rglob("*") if path.is_file())
    return {
        *(f"syncbn/{path.relative_to(sources)}" for path in modules),
        *(f"syncbn/include/syncbn/{path.name}" for path in headers),
        *(f"syncbn/cmake/syncbn{name}" for name in CMAKE),
        *(f"syncbn/cmake/{path}" for path in cmake),
        *(f"syncbn/lib/{name}" for name in (*LIBRARIES, *([CUDA_LIBRARY] if cuda else []))),
        *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", SBOM)),
        *(f"{info}/licenses/{name}" for name in LICENSES),
    }


def check_files(files: dict[str, bytes], info: str) -> Iterator[str]:
    cuda = b'\ncuda_version: str | None = "' in files.get("syncbn/_build.py", b"")
    expected = expected_files(info, cuda)
    for name in sorted(set(files) - expected):
        if FOREIGN.fullmatch(name.rpartition("/")[2]):
            yield f"{name}: comes with PyTorch, the driver or the system"
        else:
            yield f"{name}: not an expected file"
    yield from (f"{name}: is missing" for name in sorted(expected - set(files)))
    size = sum(map(len, files.values())) / 1e6
    if size >= MEGABYTES:
        yield f"size: got {size:.1f} MB unpacked, expected less than {MEGABYTES}"


def check_record(files: dict[str, bytes], info: str) -> Iterator[str]:
    rows = list(csv.reader(files.get(f"{info}/RECORD", b"").decode().splitlines()))
    listed = [row[0] for row in rows]
    yield from (f"RECORD: lacks {name}" for name in sorted(set(files) - set(listed)))
    for name, *entry in rows:
        if name not in files or listed.count(name) != 1:
            yield f"RECORD: {name} is not one file of the wheel"
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        right = [f"sha256={digest}", str(len(files[name]))]
        if entry != (["", ""] if name == f"{info}/RECORD" else right):
            yield f"RECORD: wrong entry of {name}"


def check_metadata(files: dict[str, bytes], info: str, wheel: Path) -> Iterator[str]:
    parse = email.parser.BytesParser().parsebytes
    metadata = parse(files.get(f"{info}/METADATA", b""))
    name, version, python, abi, platform = wheel.stem.split("-")
    header = (ROOT / "include" / "syncbn" / "version.h").read_text(encoding="utf-8")
    release = ".".join(re.findall(r"VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
    if not re.fullmatch(re.escape(release) + r"(\.dev\d+)?", version):
        yield f"version: got {version}, expected that of version.h, {release}"
    for key, wanted in {
        "Name": [name],
        "Version": [version],
        "Requires-Dist": REQUIRES,
        "Requires-Python": [">=3.10"],
        "License-Expression": ["Apache-2.0"],
        "License-File": list(LICENSES),
    }.items():
        if metadata.get_all(key, []) != wanted:
            yield f"METADATA: {key}: got {metadata.get_all(key, [])}, expected {wanted}"
    for link in LINK.findall(CODE.sub("", metadata.get_payload())):
        yield f"METADATA: description: {link[2]} is not beside it on the package index"
    for name in LICENSES:
        if files.get(f"{info}/licenses/{name}") != (ROOT / name).read_bytes():
            yield f"{name}: is not that of the sources"
    tags = parse(files.get(f"{info}/WHEEL", b""))
    if (python, abi) != ("py3", "none") or tags.get_all("Tag") != [f"py3-none-{platform}"]:
        yield f"tag: got {wheel.stem} and {tags.get_all('Tag')}, expected one of py3-none, in both"
    if tags["Root-Is-Purelib"] != "false":
        yield f"WHEEL: Root-Is-Purelib: got {tags['Root-Is-Purelib']}, expected false"


def check_sbom(files: dict[str, bytes], info: str) -> Iterator[str]:
    """The components are what the libraries contain, each with a version and a licence."""
    if f"{info}/{SBOM}" not in files:
        return  # told as a missing file
    sbom = json.loads(files[f"{info}/{SBOM}"])
    version = info.removeprefix("syncbn-").removesuffix(".dist-info")
    if sbom["metadata"]["component"]["version"] != version:
        yield f"{SBOM}: version: got {sbom['metadata']['component']['version']}, expected {version}"
    libraries = b"".join(content for name, content in files.items() if name.endswith(".so"))
    wanted = ["torch", "gcc", *(["cudart_static"] if CUDART in libraries else [])]
    names = [part["name"] for part in sbom["components"] if part["version"] and part["licenses"]]
    if names != wanted:
        yield f"{SBOM}: components: got {names}, expected {wanted}"


def readelf(option: str, library: Path) -> str:
    command = ["readelf", "--wide", option, str(library)]
    environment = os.environ | {"LC_ALL": "C"}  # its words are translated
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout


def needed_versions(library: Path) -> set[str]:
    """Such as GLIBC_2.34; not those that the library itself defines."""
    _, _, needs = readelf("--version-info", library).partition("Version needs section")
    return set(re.findall(r"Name: (\S+)  Flags", needs))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def fits(version: str, policy: tuple[int, int]) -> bool:
    version = version.replace("GLIBC_ABI_DT_RELR", "GLIBC_2.36")
    family, _, number = version.partition("_")
    has = {"GLIBC": policy, **POLICIES[policy]}.get(family)
    return bool(has and re.fullmatch(r"\d+(\.\d+)*", number)) and numbers(number) <= has


def lowest_policy(versions: set[str]) -> tuple[int, int] | None:
    return next((p for p in POLICIES if all(fits(version, p) for version in versions)), None)


def check_library(library: Path) -> Iterator[str]:
    section = readelf("--dynamic", library)
    for needed in re.findall(r"\(NEEDED\).*\[(.+)\]", section):
        if not re.fullmatch(NEEDED[library.name], needed):
            yield f"{library.name}: needs {needed}"
    path = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", section)
    wanted = [] if library.name == "libsyncbn.so" else ["$ORIGIN"]
    if path != wanted:
        yield f"{library.name}: search path: got {path}, expected {wanted}"


def check_platform(
    platform: str, machines: set[str], versions: set[str], at_most: tuple[int, int]
) -> Iterator[str]:
    for version in sorted(versions):
        if not fits(version, at_most):
            yield f"{version}: newer than manylinux_{at_most[0]}_{at_most[1]} or not in its list"
    lowest = lowest_policy(versions)
    machine = "/".join(sorted(machines))
    tag = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", platform)
    if lowest is None:
        return  # told above
    if not tag or tag[3] != machine or (int(tag[1]), int(tag[2])) < lowest:
        yield f"tag: got {platform}, expected manylinux_{lowest[0]}_{lowest[1]}_{machine} or newer"


def read(wheel: Path) -> tuple[dict[str, bytes], list[str]]:
    """Contents by name, and the names that occur twice."""
    with zipfile.ZipFile(wheel) as archive:
        names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
        files = {name: archive.read(name) for name in names}
    return files, sorted({name for name in names if names.count(name) > 1})


def look_at_libraries(files: dict[str, bytes]) -> tuple[list[str], set[str], set[str]]:
    """Problems, machines and needed versions of the package's own libraries."""
    problems, machines, versions = [], set(), set()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            library = Path(folder, name.rpartition("/")[2])
            if library.name not in NEEDED:
                continue
            if not content.startswith(b"\x7fELF"):
                problems.append(f"{name}: not an ELF file")
                continue
            library.write_bytes(content)
            problems += check_library(library)
            machine = re.search(r"Machine:\s+(.*)", readelf("--file-header", library))[1]
            machines.add(MACHINES.get(machine, machine))
            versions |= needed_versions(library)
    return problems, machines, versions


def check(wheel: Path, at_most: tuple[int, int] = max(POLICIES)) -> list[str]:
    """What is wrong with the wheel."""
    files, twice = read(wheel)
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    problems, machines, versions = look_at_libraries(files)
    return [
        *(f"{name}: twice in the wheel" for name in twice),
        *check_files(files, info),
        *check_record(files, info),
        *check_metadata(files, info, wheel),
        *check_sbom(files, info),
        *problems,
        *check_platform(wheel.stem.split("-")[-1], machines, versions, at_most),
    ]


def retag(wheel: Path) -> Path:
    """The wheel under the oldest manylinux tag that its libraries fit; the old file is gone."""
    _, machines, versions = look_at_libraries(read(wheel)[0])
    lowest = lowest_policy(versions)
    if lowest is None or len(machines) != 1:
        return wheel  # check tells
    platform = f"manylinux_{lowest[0]}_{lowest[1]}_{machines.pop()}"
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform, wheel]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return wheel.with_name("-".join([*wheel.stem.split("-")[:-1], platform]) + ".whl")


def policy(text: str) -> tuple[int, int]:
    name = re.fullmatch(r"(?:manylinux_)?(\d+)_(\d+)", text)
    if not name or (int(name[1]), int(name[2])) not in POLICIES:
        known = ", ".join(f"{a}_{b}" for a, b in POLICIES)
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one of {known}")
    return int(name[1]), int(name[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--retag", action="store_true", help="write the right platform tag first")
    parser.add_argument(
        "--at-most",
        type=policy,
        default=max(POLICIES),
        metavar="2_28",
        help="the newest manylinux policy that the libraries may need",
    )
    given = parser.parse_args()
    if shutil.which("readelf") is None:
        parser.error("readelf was not found: install binutils")
    wheel = retag(given.wheel) if given.retag else given.wheel
    problems = check(wheel, given.at_most)
    for problem in problems:
        print(f"{wheel.name}: {problem}", file=sys.stderr)
    if problems:
        return 1
    files, _ = read(wheel)
    size = sum(map(len, files.values())) / 1e6
    print(f"{wheel}: {len(files)} files, {size:.1f} MB unpacked, as they should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
