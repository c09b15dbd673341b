import functools
import inspect
import os
import signal
from unittest import mock

# Here and in what tests start: with more threads, tests side by side wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

with mock.patch("torch.cuda.is_available", return_value=False):  # --device is "cpu" by default, also beside a GPU
    import hopplus_mcts  # noqa: F401
    import hopplus_ppo
    import pretrain_vae
    import pretrain_world_model
    import stag_hunt_env

    import helpers

# Each command line that is parsed reads where its flags are defined: once is enough
inspect.getsource = functools.cache(inspect.getsource)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def auto_is_the_cpu(request, monkeypatch):
    """Also where there is a GPU, tests without the marker run on the CPU"""
    if "cuda" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True, scope="module")
def keep_determinism():
    """What pretrain_vae.py asks for on a GPU holds for its own tests only."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    if torch.are_deterministic_algorithms_enabled() != before:  # which loads torch's compiler: 3 seconds
        torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    """A run has its own"""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def no_pictures(monkeypatch):
    """They take most of the time of a tiny run"""
    monkeypatch.setattr(pretrain_vae, "draw", lambda *_: mock.Mock())
    monkeypatch.setattr(pretrain_world_model, "draw_cases", lambda *_: mock.Mock())
    monkeypatch.setattr(stag_hunt_env, "write_gif", lambda *_: None)
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: None)
    monkeypatch.setattr(SummaryWriter, "add_figure", lambda *args, **kwargs: None)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """method, script, flags -> the folder of a tiny run of two seeds, trained once in all tests"""

    @functools.cache
    def train(method="hopplus", script=hopplus_ppo, **changes):
        changes = {"num_seeds": 2, **changes}
        return helpers.train_tiny(tmp_path_factory.mktemp("runs"), method, script, **changes)[0]

    return train
