"""tools/api_table.py: public names of both front ends, and the list that pairs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import api_table

PACKAGE = """
from tessera import zero
from tessera.engine import Engine
from tessera._core import Config
from tessera.errors import Lost
__all__ = ["Config", "Engine", "Lost", "zero"]
"""
ENGINE = """
class _Base:
    def step(self): ...
class Engine(_Base):
    module: object
    _hidden = 1
    lend = 2
    def __init__(self):
        self.device = self.core.own = local = None
    @property
    def core(self): ...
class Pipeline(Engine):
    def step(self): ...
    def train(self): ...
class Own(Pipeline): ...
"""
HEADER = r"""
// class Commented {};
#define TESSERA_FAIL(Class, ...) \
  class Defined {}
namespace torch::nn { class Module; }
namespace tessera::nn {
namespace detail { void hidden(); }
namespace { void local() {} }
enum class Kind : int { One, Two };
class Forward;
using Maker = std::function<int(const std::vector<int>&)>;
inline constexpr int kMost = 3;
template <class A, class B = std::vector<A>>
class Engine final : public Session {
  int own_ = 0;
  void mine();

 public:
  using Memory = int;
  using Session::core;
  explicit Engine(int x) : own_{x}, b_(x) { if (x < 2) { mine(); } }
  ~Engine();
  Engine(const Engine&) = delete;
  bool operator<(const Engine& other) const { return own_ < other.own_; }
  bool step(std::optional<double> norm = {}, const std::function<void(int)>& f = [](int) {});
  std::map<int, std::string> groups() const { return {{1, "};"}}; }
  struct Options { int one = 1 << 2, two = {}; bool odd() const; };

 private:
  struct State { int x; };
  std::unique_ptr<State> state_;
};
struct LayerImpl { at::Tensor forward(at::Tensor x); };
TORCH_MODULE(Layer);
template <class E>
auto Engine<E>::defined(int x) -> int { return x; }
std::vector<int> made(int size, std::string name = "a, b(", char c = '{');
}  // namespace tessera::nn
namespace tessera { using nn::Engine; void free(); }
"""
PYTHON = {
    "Config",
    "Config.get",
    "Engine",
    "Engine.module",
    "Engine.lend",
    "Engine.device",
    "Engine.core",
    "Engine.step",
}
PYTHON |= {"Lost", "zero.Init", "zero.mark"}
CPP = (
    "nn::Kind nn::Maker nn::Engine nn::Engine::core nn::Engine::step nn::Engine::groups nn::Engine::Options Engine free"
)
CPP += " nn::Engine::Options::odd nn::Layer nn::Layer::forward nn::made"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "python/tessera/__init__.py": PACKAGE,
        "python/tessera/_core.pyi": "class _Keys:\n    bf16: int\nclass Config(_Keys):\n    def get(self): ...\n",
        "python/tessera/errors.py": "__all__ = ['Lost']\nclass Lost(Exception): ...\n",
        "python/tessera/engine/__init__.py": "from tessera.engine._engine import Engine\n__all__ = ['Engine']\n",
        "python/tessera/engine/_engine.py": ENGINE,
        "python/tessera/engine/program.py": "__all__ = ['Program']\n",
        "python/tessera/zero/__init__.py": "from tessera.zero import leaf\nfrom tessera.zero.leaf import *\n"
        "__all__ = [*leaf.__all__, 'Init']\n",
        "python/tessera/zero/engines.py": "__all__ = ['Region']\n",
        "python/tessera/zero/leaf.py": "__all__ = ['mark']\n",
        "tessera/engine.h": '#include "tessera/nn/engine.h"\n',
        "tessera/nn/engine.h": HEADER,
        "tessera/nn/inside.h": "namespace tessera::nn { void inside(); }\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in ("tools", "docs"):
        (tmp_path / folder).mkdir()
    return tmp_path


def test_names(tree):
    found = api_table.cpp_names(tree)
    assert found.names == set(CPP.split())
    assert {"nn::kMost", "nn::Engine::Memory", "nn::Engine::Options::one", "nn::Engine::Options::two"} <= found.objects
    assert found.bases == {"nn::Engine": {("nn::Session", True)}}
    assert api_table.python_names(tree).names == PYTHON


def test_members_of_a_public_base_are_its_own(tree):
    path = tree / "python/tessera/engine/_engine.py"
    node = next(node for node in api_table.parsed(path).body if getattr(node, "name", "") == "Pipeline")
    assert api_table.members(path, node, {"Engine"}, tree) == {"train"}
    assert api_table.bases(path, node, {"Engine"}, tree) == {"Engine"}
    assert api_table.bases(path, node, {"_Base"}, tree) == {"_Base"}


ALL = """// how to read it
= docs/api.md | Engines of both
# Engines
Config.{get}, Engine.{core, device, lend,
    module, step} | Engine, nn::Engine::{core, groups, step}, nn::Engine::Options::{odd, one} | a note
zero.Init | - not in C++ yet
= docs/more.md | The rest
# Others
zero.mark,
    Lost | nn::Kind
- made by hand | nn::Layer::*, nn::Maker, nn::made, free
"""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "", ""),
        ("zero.Init | - not in C++ yet\n", "", "no line has Python's zero.Init"),
        (", free", "", "no line has C++'s free"),
        ("odd, one}", "odd, three}", "C++ has no nn::Engine::Options::three; take it off"),
        ("zero.Init", "zero.Init, zero.Old", "Python has no zero.Old; take it off"),
        ("Engine.{core, ", "Engine.{", "no line has Python's Engine.core"),
        ("nn::Engine::{core, groups, step}", "nn::Engine::{core, step}", "no line has C++'s nn::Engine::groups"),
    ],
)
def test_the_list_has_every_name(before, after, said, tree, capsys):
    (tree / api_table.LIST).write_text(ALL.replace(before, after) if before else ALL)
    assert api_table.main([], tree) == api_table.main(["--check"], tree) == bool(said)
    assert said in capsys.readouterr().err
    first, rest, alone = ((tree / "docs" / name).read_text() for name in ("api.md", "more.md", "api_alone.md"))
    assert first.startswith("# Engines of both\n") and "## Engines\n" in first and "(more.md)" in first
    assert "| `zero.mark`, `Lost` | `nn::Kind` |" in rest and "## Engines" not in rest
    assert "## In Python alone\n" in alone
    (tree / "docs/more.md").write_text(rest + "by hand")
    assert api_table.main(["--check"], tree) == 1
    assert "docs/more.md is not what tools/api_pairs.txt says" in capsys.readouterr().err


def test_lines_that_say_nothing_are_refused():
    for line in ("Engine", "- no | - no", "Engine | - no | a note", "a | b | c | d"):
        with pytest.raises(ValueError, match="not a line of it"):
            api_table.rows_of(line)
    for line in ("a.* | b", "a | b::*, c"):  # a name that comes below it would be taken for paired
        with pytest.raises(ValueError, match=r"is paired; say what it has, as X\.\{a, b\}"):
            api_table.rows_of(line)


STAGES = """
from tessera.engine import Engine
class Stage(Engine):
    def __init__(self, stages, *, seed=0): ...
    save = method_of("_saving", Saving.save)
class Saving:
    def save(self, folder): ...
def cut(model, ranks): ...
"""
PIPELINE = """
#include "tessera/nn/engine.h"
namespace tessera::nn {
class Pipeline : private Engine {
 public:
  using Engine::core;
  %s
};
struct StageOptions { int stages = 1, seed = 0; };
}
"""
STAGE_LIST = """= docs/api.md | All
# Engines
Engine | nn::Engine
Engine.core, Engine.device, Engine.lend, Engine.module | nn::Engine::core
Engine.step | nn::Engine::step
zero.Stage.{save} | nn::Pipeline, nn::StageOptions
- no | nn::Engine::*, nn::Kind, nn::Layer::*, nn::Maker, nn::made, free, Engine
Config.*, Lost, zero.Init, zero.mark, zero.cut | - no
"""


@pytest.fixture
def said(tree, capsys):
    """What is wrong with a list, where zero.Stage and nn::Pipeline have engines as bases."""
    (tree / "python/tessera/zero/__init__.py").write_text(
        "from tessera.zero import leaf\nfrom tessera.zero.leaf import *\nfrom tessera.zero._stages import Stage, cut\n"
        "__all__ = [*leaf.__all__, 'Init', 'Stage', 'cut']\n"
    )

    def check(lines, let_through="using Engine::step;"):
        (tree / "python/tessera/zero/_stages.py").write_text(STAGES)
        (tree / "tessera/nn/pipeline.h").write_text(PIPELINE % let_through)
        (tree / "tessera/pipeline.h").write_text('#include "tessera/nn/pipeline.h"\n')
        (tree / api_table.LIST).write_text(lines)
        api_table.main([], tree)
        return capsys.readouterr().err.replace(f"{api_table.LIST}: ", "").splitlines()

    return check


def test_what_is_inherited_is_compared_by_the_line_of_the_base(said):
    assert said(STAGE_LIST) == []
    lost = "no line has Python's zero.Stage.step, which it has from Engine; of nn::Pipeline, nn::StageOptions none has"
    assert said(STAGE_LIST, "") == [f"{lost} step"]
    assert said(STAGE_LIST + "zero.Stage.step | - its batches\n", "") == []
    assert said(STAGE_LIST + "zero.Stage.run | - its batches\n") == [
        "Python has no zero.Stage.run; take it off the list"
    ]
    assert said(STAGE_LIST, "using Engine::step; void own();") == ["no line has C++'s nn::Pipeline::own"]


def test_arguments_and_fields_are_compared_where_some_are_paired(said):
    some = STAGE_LIST + "zero.Stage(stages) | nn::StageOptions::stages\n"
    assert said(some) == ["no line has Python's zero.Stage(seed)", "no line has C++'s nn::StageOptions::seed"]
    assert said(some + "zero.Stage(seed) | nn::StageOptions::seed\n") == []
    other = some + "zero.Stage(seed), zero.Stage(size) | nn::StageOptions::seed\n"
    assert said(other) == ["Python has no zero.Stage(size); take it off the list"]
    of_calls = "zero.cut(model) | - no\nzero.Stage.save(folder) | - no\n"
    assert said(STAGE_LIST + of_calls) == ["no line has Python's zero.cut(ranks)"]


def test_the_page_of_this_tree():
    assert api_table.main(["--check"]) == 0, "change tools/api_pairs.txt and run python tools/api_table.py"
