# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is what there is."""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tdcoll
from tdcoll import errors
from tdcoll.bench import report
from tdcoll.collectives._host.call import spec_of
from tdcoll.collectives._host.explain import explain_call
from tdcoll.collectives._host.plan import Facts
from tdcoll.collectives._host.pool import sizes_for
from tdcoll.runtime.topology import Topology
from tdcoll.spec.functions import table
from tdcoll.testing import Deadlock, World, first_failure

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "docs/results/README.md"])


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def test_readme_is_short_and_has_exactly_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    commands = [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines() if line]
    assert commands == ["bash launch.sh tutorials/02-all-gather.py", "bash launch.sh tests"]


def test_readme_has_one_picture_and_one_small_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"(?:^\|.*\n)+", text, re.M)
    lines = table.splitlines()
    assert 2 < len(lines) <= 2 + 6
    assert max(line.count("|") for line in lines) <= 5 + 1
    assert text.count("![") == 1


@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_readme_example_runs(ranks_per_node):
    (example,) = blocks(ROOT / "README.md", "python")
    assert len(example.splitlines()) <= 15
    code = compile(example, "README.md", "exec")
    done = []

    def host(pe):
        names: dict[str, object] = {}
        exec(code, names)
        done.append(names["rank"])

    World(4, seed=1, weak=True, ranks_per_node=ranks_per_node).run(host)
    assert sorted(done) == [0, 1, 2, 3]


def first_kernel(tmp_path: Path, *changes: tuple[str, str]) -> Any:
    """The program of docs/first-kernel.md, as a host function."""
    (example,) = blocks(ROOT / "docs/first-kernel.md", "python")
    for old, new in changes:
        assert example.count(old) == 1
        example = example.replace(old, new)
    file = tmp_path / "pass_on.py"  # a file, because Triton reads the source of kernels
    file.write_text(example, encoding="utf-8")
    code = compile(example, str(file), "exec")
    return lambda pe: exec(code, {"__name__": "pass_on"})


def test_the_first_kernel_is_short_and_right(tmp_path):
    assert len((ROOT / "docs/first-kernel.md").read_text(encoding="utf-8").splitlines()) <= 40
    for seed in range(8):
        World(4, seed=seed, weak=True).run(first_kernel(tmp_path))


def test_mistakes_in_the_first_kernel_are_named(tmp_path):
    """Which the page says."""
    with pytest.raises(Deadlock, match=r"waits for pe\d\.arrived\[0\] >= 2, is 1 \(.*pass_on\.py:11\)"):
        World(4, seed=0, weak=True).run(first_kernel(tmp_path, ("CMP_GE, 1,", "CMP_GE, 2,")))
    without = first_kernel(tmp_path, ("    tdl.wait_signal(arrived, tdl.CMP_GE, 1, monitor)\n", ""))
    assert first_failure(lambda world: world.run(without), n_pes=4, seeds=8) is not None


def test_the_profiling_page_has_what_is_printed():
    """Of 8 GPUs for which nothing was measured."""
    text, nbytes, heap = (ROOT / "docs/profiling.md").read_text(encoding="utf-8"), 4096 * 8192 * 2, 384 << 20
    topology, spec = Topology.of(0, range(8), [0] * 8), spec_of("all_reduce")
    sizes = sizes_for(spec, spec.inbox(nbytes, 8, heap), topology, heap, heap)
    words = {"ll_bytes": sizes.ll_bytes, "lamport_bytes": sizes.lamport_bytes, "itemsize": 2}
    said = explain_call(spec, Facts(nbytes, topology, sizes.capacity, stores=True, **words))
    assert f"```\n{said}\n```" in text
    (call,) = re.findall(r"^print\((tdcoll\.memory_plan.*)\)$", text, re.M)
    assert f"```\n{eval(call, {'tdcoll': tdcoll})}\n```" in text
    examples = doctest.DocTestFinder().find(tdcoll.memory_plan, globs={"tdcoll": tdcoll})
    assert doctest.DocTestRunner().run(examples[0]) == (0, 2)


def test_tables_are_what_the_results_say():
    made = report.pages(ROOT)
    assert {page.name for page in made} == {"README.md", "performance.md"}
    stale = [page.name for page, text in made.items() if text != page.read_text(encoding="utf-8")]
    assert stale == [], "run python -m tdcoll report --write"


def test_a_changed_number_is_found(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = Path(shutil.copy(ROOT / "README.md", tmp_path))
    text = page.read_text(encoding="utf-8")
    changed = re.sub(r"(\| 1 KB \| )[\d.]+", r"\g<1>0.01", text)
    page.write_text(changed, encoding="utf-8")
    assert report.pages(tmp_path)[page] == text != changed


def test_every_result_is_on_a_page():
    """With its tables, or by name in the list of results. Every picture there is of one."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    listed = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    found = [path.name for path in (ROOT / "docs/results").glob("*.json")]
    results = {name.split(".")[0] for name in found}  # one may be in several parts
    assert results
    assert [name for name in sorted(results) if f"<!-- report: {name} -->" not in text] == []
    assert [name for name in sorted(found) if f"`{name}`" not in listed] == []
    pictures = {path.stem for path in (ROOT / "docs/results").glob("*.png")}
    assert pictures == set(report.pictures(ROOT)) <= results


def test_table_of_the_language_is_up_to_date():
    text = (ROOT / "docs/language.md").read_text(encoding="utf-8")
    found = re.search(r"^<!-- table -->\n(.*)^<!-- /table -->$", text, re.M | re.S)
    assert found is not None
    assert found[1].strip() == table(), "put the output of python -m tdcoll.language into docs/language.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](#another) [c](page.md#a-title) [d](gone.md) [e](https://x.y/z)\n")
    assert broken_links(page) == ["#another", "gone.md"]


def test_every_error_is_explained():
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    assert [name for name in errors.__all__ if f"`{name}`" not in text and f"tdcoll.{name}`" not in text] == []


def test_options_and_variables_exist():
    usage = subprocess.run(
        ["bash", str(ROOT / "launch.sh"), "--help"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    text = (ROOT / "docs/multi-node.md").read_text(encoding="utf-8")
    options = {line.split("`")[1].split()[0] for line in text.splitlines() if line.startswith("| `--")}
    assert options
    assert [option for option in sorted(options) if option not in usage] == []

    sources = [ROOT / "launch.sh", ROOT / "setenv.sh", *(ROOT / "tdcoll").rglob("*.py")]
    code = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    variables = set(re.findall(r"\b(?:TDCOLL|NVSHMEM)_[A-Z_]+\b", text))
    assert variables
    assert [variable for variable in sorted(variables) if variable not in code] == []


PORTED = """
import triton.language as tl
import tdcoll
{imports}


@tdcoll.jit
def kernel(data, signals, nbytes):
    me = libshmem_device.my_pe()
    peer = (me + 1) % libshmem_device.n_pes()
    libshmem_device.putmem_block(data + 8, data, nbytes, peer)
    libshmem_device.fence()
    __syncthreads()
    if tid(0) == 0:
        libshmem_device.signal_op(signals, 1, libshmem_device.NVSHMEM_SIGNAL_SET, peer)
        libshmem_device.signal_wait_until(signals, libshmem_device.NVSHMEM_CMP_GE, 1)
    __syncthreads()
"""


def test_kernel_of_same_names_with_other_imports(tmp_path):
    """With exactly the imports that docs/language.md gives."""
    import importlib.util

    import torch

    import tdcoll
    from tdcoll import runtime

    (block,) = [text for text in blocks(ROOT / "docs/language.md", "python") if "triton_dist" in text]
    imports = "\n".join(line for line in block.splitlines() if re.match("import|from", line))
    path = tmp_path / "ported.py"
    path.write_text(PORTED.format(imports=imports))
    spec = importlib.util.spec_from_file_location("ported", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def host(pe):
        data, signals = tdcoll.empty(16, torch.int32), tdcoll.empty(1, torch.int64)
        data.fill_(pe)
        signals.zero_()
        runtime.current().control.all_gather(range(3), "zeroed", None)
        module.kernel[(1,)](data, signals, 32)
        assert data.tolist() == [pe] * 8 + [(pe - 1) % 3] * 8

    for seed in range(10):
        World(3, seed=seed, weak=True).run(host)


def test_nothing_of_the_workplace_is_mentioned():
    """Pages stand on their own: no absolute paths of a machine."""
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(work|opt|home|root)/", page.read_text(encoding="utf-8")), page
        assert os.sep == "/"
