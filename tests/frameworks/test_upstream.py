# SPDX-License-Identifier: Apache-2.0
"""Versions and signatures of frameworks are checked, and the messages say what is supported."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from topoep.adapters.upstream import check_parameters, check_version


@pytest.mark.parametrize("found", ["0.19", "0.19.2", "0.19.9rc1", "0.20.1+cpu"])
def test_supported_versions_pass(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: found)
    check_version("framework", "0.19", "0.21")


@pytest.mark.parametrize("found", ["0.18.9", "0.21", "0.21.0rc1", "1.0", "unknown"])
def test_other_versions_are_named_together_with_the_supported_ones(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: found)
    with pytest.raises(ImportError, match=rf"framework >= 0\.19, < 0\.21; framework {found} is"):
        check_version("framework", "0.19", "0.21")


def test_missing_package():
    with pytest.raises(ImportError, match="no-such-framework >= 1, < 2, which is not installed"):
        check_version("no-such-framework", "1", "2")


def test_changed_signature_is_named():
    class Layer:
        def forward(self, x, scores, mask=None):
            raise AssertionError("not called")

    check_parameters(Layer.forward, "x", "scores", "mask")
    for names in (("x", "scores"), ("x", "mask", "scores"), ("x", "scores", "mask", "more")):
        with pytest.raises(ImportError, match=r"forward takes \(x, scores, mask\)"):
            check_parameters(Layer.forward, *names)


@pytest.mark.parametrize("framework", ["transformers", "deepep", "deepspeed"])
def test_importing_an_adapter_does_not_import_its_framework(framework):
    code = f"import sys, topoep.adapters.{framework}; sys.exit('{framework}' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
