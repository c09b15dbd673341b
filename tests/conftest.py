import os

# Here and in what tests start: with more threads, tests side by side wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"


import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--transitions", type=int, default=40_000, help="game-steps compared with the plain-Python game")


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
    torch.use_deterministic_algorithms(before)
