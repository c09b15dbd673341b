import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--transitions", type=int, default=100_000, help="game-steps compared with the plain-Python game")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
