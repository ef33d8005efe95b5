"""Systems whose wheels have the native library in them, and their tags."""

import platform
import sys
from types import ModuleType

import pytest
from packaging.tags import mac_platforms

from tests.support.build_modules import build_module


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """Load the build's own module."""
    return build_module("build_hook")


@pytest.mark.parametrize(
    ("system", "chosen", "has"),
    [
        ("linux", "", True),
        ("darwin", "", False),
        ("darwin", "0", False),
        ("darwin", "1", True),
        ("win32", "1", False),
    ],
)
def test_macos_gets_the_library_only_where_it_is_chosen(
    system, chosen, has, hook: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setenv(hook.MACOS_VARIABLE, chosen)

    assert hook.has_library() is has


@pytest.mark.parametrize(
    ("target", "tag"),
    [("11.0", "macosx_11_0_arm64"), ("14.2", "macosx_14_0_arm64"), ("", "macosx_15_0_arm64")],
)
def test_a_wheel_for_macos_has_a_tag_that_its_installer_knows(
    target, tag, hook: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", target)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))

    assert hook.macos_tag() == tag
    assert tag in mac_platforms((15, 5), "arm64")
