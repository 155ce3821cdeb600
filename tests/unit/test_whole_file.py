"""A file is written as a whole or not at all."""

import contextlib
import os
import resource
import signal
import stat
from pathlib import Path

import pytest

from stepgauge.report.page import Page
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.store import StoreError


@contextlib.contextmanager
def full_disk():
    """As on a full disk, files of this process have at most 50 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    "write",
    [Page(title="new", facts={}, sections=()).write, HardwareFile(name="new").write],
    ids=["page", "hardware"],
)
def test_a_full_disk_leaves_the_earlier_file_and_no_other(tmp_path, write):
    path = tmp_path / "file"
    path.write_text("earlier")
    with full_disk(), pytest.raises((StoreError, OSError)):
        write(path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "earlier"


def test_an_interrupt_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("earlier")

    def interrupted(draft, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HardwareFile(name="new").write(path)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "earlier")]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_the_permissions_of_the_earlier_file_and_a_link_to_it_stay(tmp_path, mode):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("earlier")
    path.chmod(mode)
    link.symlink_to(path)
    HardwareFile(name="new").write(link)
    assert HardwareFile.read(path).name == "new" and link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_usual_permissions(tmp_path):
    HardwareFile(name="new").write(tmp_path / "file")
    (tmp_path / "other").touch()
    modes = {each.stat().st_mode for each in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_page_can_be_written_to_a_pipe():
    """A pipe, such as /dev/stdout, is not replaced by a file."""
    read, write = os.pipe()
    page = Page(title="new", facts={}, sections=())
    assert len(page.html()) < 65_536, "does not fit into the pipe"
    page.write(Path(f"/dev/fd/{write}"))
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as file:
        assert file.read() == page.html()
