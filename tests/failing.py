"""A run of tests names each test as soon as it has failed, and says why.

pytest does so at its end, which a run that is cut off does not reach, as on a machine that is lent for some minutes.
"""

from __future__ import annotations

import os

import pytest


class Failing:
    """The plugin; only the process that prints has it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write(f"\n{report.when} failed: {report.nodeid}\n")
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:
                terminal.write(f"{crash.path}:{crash.lineno}: {crash.message}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register it, where this process is no worker."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Failing(config))
