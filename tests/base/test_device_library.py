# SPDX-License-Identifier: Apache-2.0
"""Which of NVSHMEM's device libraries serves an architecture, for the layouts of all versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tdcoll.base.device_library import device_library


def installed(folder: Path, *files: str) -> Path:
    """A folder with device libraries, ``""`` the one for all architectures, and other files beside
    them."""
    folder.mkdir(parents=True)
    for file in files:
        (folder / f"libnvshmem_device{file}.bc").touch()
    for other in (
        "libnvshmem_host.so.3",
        "libnvshmem_device.a",
        "libnvshmem_device_sm_90a.bc",
        "sm_90.bc",
    ):
        (folder / other).touch()
    return folder


OLD = ("",)
CUDA_12 = ("_sm_70", "_sm_80", "_sm_89", "_sm_90")
CUDA_13 = ("_sm_75", "_sm_80", "_sm_89", "_sm_90")
NEWEST = (*CUDA_13, "_sm_100")


@pytest.mark.parametrize(
    ("files", "arch", "file"),
    [
        (OLD, 80, ""),
        (OLD, 100, ""),
        (CUDA_12, 70, "_sm_70"),
        (CUDA_12, 75, "_sm_70"),
        (CUDA_13, 75, "_sm_75"),
        (CUDA_13, 86, "_sm_80"),
        (CUDA_13, 89, "_sm_89"),
        (CUDA_13, 90, "_sm_90"),
        (CUDA_13, 100, "_sm_90"),
        (NEWEST, 90, "_sm_90"),
        (NEWEST, 100, "_sm_100"),
        (NEWEST, 120, "_sm_100"),
        (("", *NEWEST), 90, "_sm_90"),  # the old name stands for an entry point of older programs
        (("", *CUDA_13), 70, ""),
    ],
)
def test_the_newest_that_the_gpu_can_run(
    tmp_path: Path, files: tuple[str, ...], arch: int, file: str
) -> None:
    folder = installed(tmp_path / "lib", *files)
    assert device_library([folder], arch) == folder / f"libnvshmem_device{file}.bc"


def test_the_first_folder_that_has_any_decides(tmp_path: Path) -> None:
    """NVSHMEM's host library comes from there too."""
    empty = installed(tmp_path / "empty")
    new, old = installed(tmp_path / "new", *NEWEST), installed(tmp_path / "old", *OLD)
    assert device_library([tmp_path / "absent", empty, new, old], 90).parent == new
    assert device_library([old, new], 90).parent == old
    with pytest.raises(FileNotFoundError, match=r"has no file for sm_70"):
        device_library([new, old], 70)


def test_none_for_an_architecture_names_those_that_are_there(tmp_path: Path) -> None:
    folder = installed(tmp_path / "lib", *NEWEST)
    names = ", ".join(f"libnvshmem_device{file}.bc" for file in NEWEST)
    text = f"{folder} has no file for sm_70 or an older architecture, only {names}. Install another version"
    with pytest.raises(FileNotFoundError, match=re.escape(text)):
        device_library([folder], 70)


@pytest.mark.parametrize("folders", [0, 2])
def test_none_at_all_says_where_it_was_looked_for_and_what_to_install(
    tmp_path: Path, folders: int
) -> None:
    places = [installed(tmp_path / str(i)) for i in range(folders)]
    with pytest.raises(FileNotFoundError) as raised:
        device_library(places, 90)
    wanted = [
        "sm_90",
        "tdcoll[cu12] or tdcoll[cu13]",
        "tdcoll[compile]",
        "NVSHMEM_HOME",
        *map(str, places),
    ]
    if not places:
        wanted.append("neither NVSHMEM_HOME nor NVIDIA's wheel is there")
    assert [part for part in wanted if part not in str(raised.value)] == []
