import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--transitions", type=int, default=40_000, help="game-steps compared with the plain-Python game")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="module")
def one_thread():
    """Tiny tensors are handled faster by one."""
    before, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(deterministic)
