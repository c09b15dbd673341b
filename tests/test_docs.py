"""README, docs and docstrings tell the truth: commands parse, flags and metrics exist, the edits train."""

import dataclasses
import functools
import importlib
import inspect
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import stag_hunt_env
from evaluation import evaluate, runs
from stag_hunt_env import StagHuntConfig

import pytest
import torch
import tyro
from helpers import lines_of, train_tiny

ROOT = Path(stag_hunt_env.__file__).resolve().parent
TRAINING = ("hopplus_ppo.py", "hopplus_mcts.py")
FILES = [path for where in ("*.py", "evaluation/*.py", "benchmarks/**/*.py") for path in sorted(ROOT.glob(where))]
MODULES = {
    str(path): importlib.import_module(".".join(path.with_suffix("").parts))
    for path in (file.relative_to(ROOT) for file in FILES if "__main__" in file.read_text())
}
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
FOREIGN = {"--dist", "--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--logdir", "--help"}
OLD = re.compile(r"^At commit .*\n", re.M)  # commands that are there at an older commit alone


# ---- The edits
def edits(page: str) -> dict[str, str]:
    """Name of the copy -> its diff"""
    found = re.findall(r"```diff\n(--- \S+\n\+\+\+ b/(\S+)\.py\n.*?)```", (ROOT / page).read_text(), re.S)
    return {name: diff for diff, name in found}


@functools.cache
def edited(name: str):
    """The edited copy as a module"""
    path = Path(tempfile.mkdtemp(), f"{name}.py")
    path.write_text((ROOT / "hopplus_ppo.py").read_text())
    if name in EDITS:
        diff = edits("docs/editing.md")[name]
        subprocess.run(["git", "apply", "-"], input=diff, cwd=path.parent, text=True, check=True)
    return runs.load_script(path)


def check_cnn(script, state, last):
    """It learns, and a batch may be split, as a long one on a GPU is"""
    first = script.TrainState(state.args, 0, state.device).networks["policy"].params["encoder.weight"]
    learned = state.networks["policy"].params["encoder.weight"]
    assert learned.shape[:3] == (3, 32, 6) and (learned != first).flatten(1).any(1).all()
    encoder = state.networks["policy"].network.encoder
    board = torch.randint(13, (3, 8, 8), generator=torch.Generator().manual_seed(1)).float()
    board[..., 7] = 0  # no walls
    whole = encoder(board)
    torch.testing.assert_close(encoder(board.view(6, 4, 8)).view_as(whole), whole)


def check_reward(script, state, last):
    """The learner in a corner, then gone; others beside it, two steps away, on its cell, around the board's edge"""
    gone = 12
    boards = [[0, gone, 1], [0, gone, 5], [0, 0, gone], [0, gone, gone], [gone, 0, 11], [3, 4, gone]]
    next_board = torch.tensor(boards, dtype=torch.uint8)[:, None]
    shaped = script.shape_reward(state, torch.ones(6, 1), None, None, next_board)
    assert shaped.flatten().tolist() == [11, 1, 11, 1, 1, 1]
    assert min(last["real/reward_mean"], last["imagined/reward_mean"]) > 2 > last["charts/episodic_return"]


def check_world_model(script, state, last):
    assert type(state.networks["world"].network).__name__ == "PlainWorldModel" and "wm/payoff_match/1" in last
    learning = state, "world_model", script.world_model_losses, 20
    losses = [script.train_model(*learning)["losses/world_model"].mean() for _ in range(2)]
    assert losses[1] < 0.9 * losses[0], "it learns"


def check_ablation(script, state, last):
    """What began anew in the meantime counts in full again"""
    batch = script.train_iteration(state)["imagined"]
    weight = batch["weight"].view(3, state.args.imagination_horizon, -1)
    assert set(weight[:, 0].flatten().tolist()) <= {0, 1} and weight[:, 0].any()
    assert set(weight[:, 3].flatten().tolist()) <= {0, 1, 0.5, 0.25, 0.125} and {1, 0.125} <= {
        *weight[:, 3].unique().tolist()
    }
    assert (batch["critic_weight"] == batch["weight"]).all()


def check_curve(script, state, last):
    for x in state.sums.values():
        x.zero_()
    boards = script.train_iteration(state)["real"]["board"]
    found = script.read_metrics(state)["my/together"]
    for learner, board in enumerate(boards[..., :3].tolist()):
        on_board = [[cell for cell in cells if cell < 12] for cells in board]
        together = sum(len(set(cells)) < len(cells) for cells in on_board)
        assert found[learner] == pytest.approx(together / 32)
    assert found.max() > 0 and last["my/together"] > 0


def check_critics(script, state, last):
    """The second head does not learn from imagined samples, and nothing but the loss asks it"""
    batch = script.train_iteration(state)["real"] | {"critic_weight": torch.zeros(3, 32)}
    imagined = batch | {"real": torch.zeros(3, 32, dtype=torch.bool)}
    weight = state.networks["policy"].params["critic.weight"]
    moved = []
    for samples in (batch, imagined):
        (grad,) = torch.autograd.grad(script.ppo_loss(state.args, state.networks["policy"], samples)[0].sum(), weight)
        moved.append(grad.abs().sum((0, 1)).gt(0).tolist())
    assert moved == [[False, True], [False, False]] and last["my/real_critic_loss"] > 0


EDITS = {
    "my_cnn": ({}, check_cnn),
    "my_reward": ({"company_bonus": 10.0}, check_reward),
    "my_world_model": ({"wm_learning_rate": 0.03}, check_world_model),
    "my_ablation": ({"depth_discount": 0.5, "imagination_horizon": 6}, check_ablation),
    "my_curve": ({}, check_curve),
    "my_critics": ({}, check_critics),
}


def test_the_page_has_these_edits_and_the_front_page_one_of_them():
    assert edits("docs/editing.md").keys() == EDITS.keys()
    assert edits("README.md").items() <= edits("docs/editing.md").items()


@pytest.mark.parametrize("name", EDITS)
def test_the_edit_trains(name, tmp_path, monkeypatch, no_pictures):
    changes, check = EDITS[name]
    assert sum(line[:1] in ("+", "-") for line in edits("docs/editing.md")[name].splitlines()) <= 35
    script, states = edited(name), []
    make_stages = script.make_stages
    monkeypatch.setattr(script, "make_stages", lambda state: states.append(state) or make_stages(state))
    (folder,) = train_tiny(tmp_path, "hopplus", script, **changes)
    assert folder.name.startswith(f"{name}__3x4"), "runs of a copy have its own name"
    check(script, states[0], lines_of(folder)[-1])
    monkeypatch.setattr(evaluate, "STARTS", 4)
    rows = evaluate.main(evaluate.Args(run=str(folder), script=script.__file__, device="cpu", games=4))
    assert len(rows) > 10


# ---- Commands and flags
def command_lines():
    """Every line of code in a page or in a docstring"""
    for page in PAGES:
        text = OLD.sub("", page.read_text())
        for block in re.findall(r"```bash\n(.*?)```", text, re.S):
            yield from block.replace("\\\n", " ").splitlines()
        yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    for script in MODULES:
        docstring = (ROOT / script).read_text().split('"""')[1]
        yield from re.findall(r"^    (.*)", docstring.replace("\\\n", " "), re.M)


def commands() -> list[tuple[str, ...]]:
    found = set()
    launched = r"(?:^|(?:python3?|torchrun) (?:-[^ ]+ (?:[^ -][^ ]* )?)*)([\w/]+\.py(?:\s[^#&|;<>]*)?)"
    for line in command_lines():
        for command in re.findall(launched, line.strip()):
            words = shlex.split(re.sub(r"[\[\]]|\.\.\.", "", command))
            if line.count("python") or line.count("torchrun") or len(words) > 1:  # else only a file's name
                found.add(tuple(words))
    return sorted(found)


def module_of(script: str):
    return edited(script[:-3]) if script.startswith("my_") else MODULES[script]


def flags_of(module):
    """What tyro makes flags of"""
    return getattr(module, "Args", None) or getattr(module, "watch", None) or module.main


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_the_command_is_understood(command, monkeypatch, capsys):
    script, *words = command
    if "--help" in words:
        return
    module = module_of(script)
    words = ["file" if word == "FILE" else word for word in words]
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if not hasattr(module, "parse_args"):
        flags = flags_of(module)
        flags = flags if inspect.isclass(flags) else functools.wraps(flags)(lambda *_, **__: None)
        tyro.cli(flags, args=words, config=(tyro.conf.OmitArgPrefixes,))
    elif "--resume" in words:
        with pytest.raises(SystemExit):
            module.parse_args()
        assert "there is no runs/RUN" in capsys.readouterr().err
    else:
        module.parse_args()


def known_flags() -> set[str]:
    """As --help names them"""
    names = {field.name for field in dataclasses.fields(StagHuntConfig)}
    for script in (*MODULES, "my_ablation.py", "my_reward.py"):
        names |= inspect.signature(flags_of(module_of(script))).parameters.keys()
    names = {name.replace("_", "-") for name in names}
    return {f"--{start}{name}" for name in names for start in ("", "no-")} | FOREIGN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_exists(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", OLD.sub("", page.read_text())))
    assert named <= known_flags(), sorted(named - known_flags())


# ---- Metrics
def metric_table(page: str) -> dict[str, str]:
    """Tags in the first column of the table of metrics -> pattern; k in `wm/exact_match/k` stands for all k"""
    part = (ROOT / page).read_text().split("\n## Logged metrics\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", part, re.M)[0].splitlines()[2:]
    tags = [tag for row in rows for tag in re.findall(r"`([^`]+)`", row.split("|")[1])]
    return {tag: re.sub(r"(?<=[/_])[ik]$", r"\\w+", tag) for tag in tags}


@pytest.mark.parametrize("script", TRAINING)
def test_the_tables_of_metrics_are_complete(script, trained):
    table = metric_table("docs/hopplus_ppo.md")
    if script == "hopplus_ppo.py":
        folder = trained("hopplus")
    else:
        table |= metric_table("docs/hopplus_mcts.md")
        folder = trained("hopplus-mcts", MODULES[script], imagination=True, num_simulations=2)
    logged = lines_of(folder)[-1].keys() - {"steps"}
    for tag in sorted(logged):
        assert any(re.fullmatch(pattern, tag) for pattern in table.values()), f"{tag} is logged, but not documented"
    for documented, pattern in table.items():
        assert any(re.fullmatch(pattern, tag) for tag in logged), f"{documented} is documented, but not logged"


# ---- Pages
def test_the_examples_of_the_game_run(capsys):
    page = (ROOT / "docs/stag_hunt_env.md").read_text()
    for example in re.findall(r"```python\n(.*?)```", page, re.S):
        if "sb3_contrib" not in example:  # which is not among our requirements
            exec(example.replace("4096", "16").replace("256", "4").replace("1000", "10"), {})


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them"""
    headings = re.findall(r"^#+ (.*)", without_code(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_resolves(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = (page.parent / path).resolve() if path else page
            assert target.exists() and target.is_relative_to(ROOT), link
            assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_every_picture_is_shown_and_small():
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"(?:\]\(|src=\")(\S+\.(?:png|gif))[)\"]", page.read_text())
    }
    for path in (*ROOT.glob("docs/**/*.png"), *ROOT.glob("docs/**/*.gif")):
        assert path.stat().st_size < 300_000, path
        assert path in shown, f"no page shows {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_stands_in_a_script(page):
    sources = "".join(path.read_text() for path in FILES)
    names = set(re.findall(r"`([A-Za-z]+_\w+|[A-Z][a-z]+[A-Z]\w+)`", page.read_text()))
    assert {name for name in names if not re.search(rf"\b{name}\b", sources)} == set()


def test_ci_runs_the_readme_s_commands():
    readme, own, workflow = (
        (ROOT / name).read_text() for name in ("README.md", ".ci/run", ".github/workflows/readme.yml")
    )
    train, test = re.findall(r"^python3 -m venv .*$", readme, re.M)
    assert test in own and train in workflow and test in workflow
