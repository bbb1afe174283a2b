"""Models of Transformers over a sequence that ranks share, without a change of the model.

Note [Attention of Transformers]
A model looks its attention function up in ALL_ATTENTION_FUNCTIONS at every call. register_with_transformers() puts a
function there, under the name that the model uses, that looks at the calling module: is it of a registered model, the
call becomes an exchange, the function that was there before with all tokens and a part of the heads, and an exchange
back. Masks that the model made of its part of the sequence mean nothing for the whole; what attends to what follows
from the position_ids of all ranks.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.sequence._documents import Attention, Ranges, attend, documents
from tessera.sequence._groups import SequenceParallelGroups, make_groups

_LABEL = "TransformersAttention"
_MARK = "_tessera_sequence_parallel"  # on modules of a registered model
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LOCAL_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # of this rank's part only
_registering = threading.Lock()


def _nothing() -> None:
    return None


class TransformersAttention:
    """How the attention of one registered model runs. Made by register_with_transformers()."""

    def __init__(
        self,
        groups: SequenceParallelGroups,
        implementation: str,
        model_type: str,
        seq_length: int | None,
        micro_batch_size: int | None,
        disable_in_eval: bool,
        parts: int = 1,
    ) -> None:
        self.groups = groups
        self.group = groups.core()
        self.implementation = implementation
        self.model_type = model_type
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.disable_in_eval = disable_in_eval
        self.parts = parts
        self._last: tuple[Any, int, Any] | None = None  # position_ids of this rank, their version, those of all
        self._layer: int | None = None  # the layer that called last

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformersAttention:
        return self

    def __reduce__(self) -> Any:
        """A pickled model is not registered when it comes back: its groups are of this run."""
        return _nothing, ()

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: object,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
        *,
        groups: SequenceParallelGroups | None = None,
        parts: int = 1,
        tensor_parallel_size: int = 1,
    ) -> SequenceParallelGroups | None:
        """Lets the model's attention run over sequence_parallel_size ranks from now on. Returns the groups, to be given
        to tessera.initialize as `group`; None, and nothing changes, for a size of 1.

        model_name_or_path: a model, what has a `.config`, or a name or path: then the call holds for all models of that
        type made later. core_attn_implementation: the model's own attn_implementation, which runs inside: "sdpa" or one
        of flash attention. seq_length: of all ranks together, and micro_batch_size: checked at each call if
        seq_length_is_variable is False. disable_in_eval: modules in eval mode attend to their own rank's tokens only,
        which then are a whole sequence. max_length: another name of seq_length. groups: in place of new ones, over all
        processes. parts: of the heads, as in SequenceAttention. tensor_parallel_size: of the new groups, where
        tensor_parallel.autotp_size is more than 1. Collective.
        """
        _core.check_parts(parts, _LABEL)
        if sequence_parallel_size == 1:
            return None
        _check_implementation(core_attn_implementation)
        config = _config_of(model_name_or_path)
        _check_config(config, core_attn_implementation, sequence_parallel_size, isinstance(model_name_or_path, str))
        length = seq_length if seq_length is not None else max_length
        _check_length(length, seq_length_is_variable, sequence_parallel_size)
        if isinstance(model_name_or_path, nn.Module):
            _check_model(model_name_or_path)
        groups = groups or make_groups(sequence_parallel_size, tensor_parallel_size=tensor_parallel_size)
        if groups.size() != sequence_parallel_size:
            raise ConfigError(
                f"[{_LABEL}] sequence_parallel_size is {sequence_parallel_size}, the groups have "
                f"{groups.size()} ranks a sequence"
            )
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        fixed = not seq_length_is_variable
        attention = cls(
            groups,
            core_attn_implementation,
            text.model_type,
            length if fixed else None,
            micro_batch_size if fixed else None,
            disable_in_eval,
            parts,
        )
        dispatch = _dispatch(core_attn_implementation)
        if isinstance(model_name_or_path, nn.Module):
            for module in model_name_or_path.modules():
                setattr(module, _MARK, attention)
            model_name_or_path.register_forward_pre_hook(_check_call, with_kwargs=True)
            for module in model_name_or_path.modules():
                if _makes_masks(module):
                    module.register_forward_pre_hook(_no_masks, with_kwargs=True)
        else:
            dispatch.by_type[text.model_type] = attention
        return groups

    def active(self, module: nn.Module) -> bool:
        """Whether a module shares its sequence now: always in training, in eval mode unless disable_in_eval."""
        return module.training or not self.disable_in_eval

    def serves(self, module: nn.Module) -> bool:
        """False for attention that is not over the shared sequence (a vision tower's), or switched off."""
        return getattr(module, "is_causal", True) and self.active(module)

    def __call__(
        self,
        core: Attention,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        self._check(module, query, key, kwargs)
        rows = self._documents(module, kwargs["position_ids"])
        _core.deal_heads(query.size(1), key.size(1), self.group.size, _LABEL)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # to [batch, sequence, heads, head_dim]
        parts = _core.HeadParts(q, k, v, _core.SequenceCut(self.group, 1, parts=self.parts))
        kwargs = {name: given for name, given in kwargs.items() if name not in _LOCAL_LENGTHS}
        for part in range(len(parts)):
            q, k, v = (t.transpose(1, 2) for t in parts.take(part)[:3])
            parts.give(part, self._local(core, _Module(module, q.size(1) // k.size(1)), (q, k, v), rows, kwargs))
        return parts.join(), None

    def _local(
        self,
        core: Attention,
        inside: _Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rows: list[Ranges] | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Runs the local attention of some of this rank's heads, over the whole sequence. [batch, sequence, heads,
        head_dim]."""
        kwargs = dict(kwargs)
        if self.implementation.startswith("flash_attention"):
            kwargs["position_ids"] = self._last[2][0] if self._last is not None and rows is not None else None
            output: torch.Tensor = core(inside, *heads, None, **kwargs)[0]
            return output
        kwargs.pop("position_ids", None)
        whole: list[Ranges] = [[(0, heads[0].size(2))]]
        return attend(core, inside, heads, rows or whole, kwargs.pop("sliding_window", None), **kwargs)

    def _check(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> None:
        name = type(module).__name__
        if query.size(2) != key.size(2):
            raise ConfigError(
                f"[{_LABEL}] {name} attends from {query.size(2)} tokens to {key.size(2)}: a cache (use_cache=True) or "
                "cross attention "
                "is not served with sequence parallelism"
            )
        if kwargs.get("output_attentions"):
            raise ConfigError(f"[{_LABEL}] output_attentions is not served with sequence parallelism")
        if "position_ids" not in kwargs:
            raise ConfigError(
                f"[{_LABEL}] {name} does not hand position_ids to its attention: packed sequences could not be told "
                "from each other; "
                f"models of type {self.model_type!r} are not served"
            )
        found = query.size(2) * self.group.size
        if self.seq_length is not None and found != self.seq_length:
            raise ConfigError(
                f"[{_LABEL}] a call has {query.size(2)} tokens on each of {self.group.size} ranks, {found} together; "
                "seq_length is "
                f"{self.seq_length} and seq_length_is_variable False"
            )
        if self.micro_batch_size is not None and query.size(0) != self.micro_batch_size:
            raise ConfigError(
                f"[{_LABEL}] a call has a batch of {query.size(0)}; micro_batch_size is {self.micro_batch_size} and "
                "seq_length_is_variable False"
            )

    def _documents(self, module: nn.Module, mine: torch.Tensor | None) -> list[Ranges] | None:
        """Where the documents of all ranks' tokens are; None where the model does not say.

        The ranks gather positions in a layer that does not follow the layer called before it: the first of a forward,
        and those that a backward computes again. All ranks gather in the same layer, whatever one rank's tensors are:
        an offload hook may copy them. A layer that follows has the positions of the layer before it."""
        layer = getattr(module, "layer_idx", None)
        follows = layer is not None and self._layer is not None and layer == self._layer + 1
        self._layer = layer
        if mine is None:
            self._last = self._last if follows else None
            return None
        if not follows or self._last is None:
            everywhere = self._gathered(mine)
            self._last = (weakref.ref(mine), mine._version, (everywhere, documents(everywhere)))
        elif self._last[0]() is not mine or self._last[1] != mine._version:
            everywhere, count = self._last[2][0], mine.size(-1)
            known = everywhere.size(-1) == count * self.group.size
            if not known or not torch.equal(everywhere.narrow(-1, self.group.rank * count, count), mine):
                raise ConfigError(
                    f"[{_LABEL}] layer {layer} has other position_ids than the layer before: all layers of a forward "
                    "must have the same"
                )
        rows: list[Ranges] = self._last[2][1]
        return rows

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        sizes = _core.gather_from_ranks(torch.tensor([mine.size(-1)], device=mine.device), self.group, 0, [], _LABEL)
        if sizes.unique().numel() > 1:
            raise ConfigError(
                f"[{_LABEL}] the {self.group.size} ranks have {sizes.tolist()} tokens of a sequence; all must have "
                "equally many: its length must be divisible by sequence_parallel_size"
            )
        everywhere: torch.Tensor = _core.gather_from_ranks(mine.contiguous(), self.group, mine.dim() - 1, [], _LABEL)
        return everywhere


class _Module:
    """The calling module for the function inside, which may ask it how many query heads share a key/value head."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups
        self.is_causal = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Dispatch:
    """What ALL_ATTENTION_FUNCTIONS has under one name: it calls the registered model's function for modules of
    registered models, and `original` for others."""

    def __init__(self, original: Attention) -> None:
        self.original = original
        self.by_type: dict[str, TransformersAttention] = {}

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        attention = module.__dict__.get(_MARK)
        if attention is None and self.by_type:
            attention = self.by_type.get(getattr(getattr(module, "config", None), "model_type", ""))
        if attention is None or not attention.serves(module):
            return self.original(module, query, key, value, attention_mask, **kwargs)
        return attention(self.original, module, query, key, value, **kwargs)


def _dispatch(implementation: str) -> _Dispatch:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with _registering:
        present = ALL_ATTENTION_FUNCTIONS[implementation]
        if not isinstance(present, _Dispatch):
            present = _Dispatch(present)
            ALL_ATTENTION_FUNCTIONS[implementation] = present
    return present


def attends_locally(model: nn.Module) -> list[str]:
    """Returns a line for the log where the model's causal attention is as Transformers has it, and not registered, so
    that it exchanges nothing with the other ranks of a sequence; else nothing."""
    if "transformers" not in sys.modules:
        return []
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(module, "is_causal", False) is not True or config is None or "forward" in vars(module):
            continue
        name = getattr(config, "_attn_implementation", None)
        function = ALL_ATTENTION_FUNCTIONS[name] if name in ALL_ATTENTION_FUNCTIONS else type(module).forward
        if isinstance(function, _Dispatch):
            if _MARK in vars(module) or getattr(config, "model_type", "") in function.by_type:
                continue
            function = function.original
        if all(inspect.unwrap(f).__module__.startswith("transformers.") for f in (function, type(module).forward)):
            return [
                f"[sequence] attention of {type(model).__name__} is local: a rank attends to its own part of a "
                f"sequence only ({type(module).__name__} as Transformers has it); call "
                f"{_LABEL}.register_with_transformers"
            ]
    return []


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Called before a forward of a registered model."""
    attention = model.__dict__.get(_MARK)
    if attention is None or not attention.active(model) or "position_ids" in kwargs:
        return
    names = list(inspect.signature(model.forward).parameters)
    if "position_ids" not in names[: len(args)]:
        raise ConfigError(
            f"[{_LABEL}] {type(model).__name__} was called without position_ids; with sequence_parallel_size "
            f"{attention.group.size} a rank's part of a sequence cannot know where it lies (SequenceLoader "
            "hands them on)"
        )


def _makes_masks(module: nn.Module) -> bool:
    """A stack of layers with causal attention, whose forward makes their mask."""
    layers = module._modules.get("layers")
    return (
        layers is not None
        and any(getattr(inner, "is_causal", False) is True for inner in layers.modules())
        and "attention_mask" in inspect.signature(module.forward).parameters
    )


def _no_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Called before the forward of a stack: a mask of 4 dims is one that Transformers takes for ready, and makes none
    of [tokens, tokens] that nobody would read."""
    attention = module.__dict__.get(_MARK)
    if attention is None or not attention.active(module):
        return None
    given = kwargs.get("attention_mask")
    if given is not None and given.dim() == 2 and not bool(given.all()):
        raise ConfigError(
            f"[{_LABEL}] attention_mask has zeros: a rank's part of a mask is of no use; pad at the end, set the "
            "labels of padding "
            "to -100 and leave the mask out"
        )
    return args, kwargs | {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}


def _check_implementation(implementation: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if implementation == "eager":
        raise ConfigError(
            f"[{_LABEL}] core_attn_implementation 'eager' is not served: it makes whole matrices of weights and each "
            "model has its "
            "own; use 'sdpa' or a flash attention"
        )
    choices = sorted(name for name in ALL_ATTENTION_FUNCTIONS if "paged" not in name and "flex" not in name)
    if implementation not in choices:
        raise ConfigError(
            f"[{_LABEL}] core_attn_implementation {implementation!r} is unknown or not served; use one of "
            f"{', '.join(choices)}"
        )


def _config_of(model: Any) -> Any:
    if isinstance(model, str):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(model)
    if not hasattr(model, "config"):
        raise ConfigError(
            f"[{_LABEL}] model_name_or_path must be a name, a model or what has a .config, got {type(model).__name__}"
        )
    return model.config


def _check_config(config: Any, implementation: str, ranks: int, by_name: bool) -> None:
    own = getattr(config, "_attn_implementation", None)
    if not by_name and own is not None and own != implementation:
        raise ConfigError(
            f"[{_LABEL}] core_attn_implementation {implementation!r} does not match model config attn_implementation "
            f"{own!r}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"[{_LABEL}] {config.model_type!r} is an encoder-decoder: it has two sequences; not served")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    others = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if others or getattr(text, "attention_chunk_size", None):
        raise ConfigError(
            f"[{_LABEL}] {text.model_type!r} has layers of type {', '.join(sorted(others)) or 'chunked_attention'}, "
            "which pass "
            "information along the sequence outside of full or sliding attention; not served"
        )
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    if heads % ranks or (keys % ranks and ranks % keys):
        raise ConfigError(
            f"[{_LABEL}] {heads} attention heads with {keys} key/value heads are not divisible by "
            f"sequence_parallel_size {ranks}: it "
            f"must divide the former, and divide or be a multiple of the latter; {_usable(heads, keys)} would do"
        )


def _usable(heads: int, keys: int) -> str:
    sizes = [n for n in range(2, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]
    return ", ".join(str(n) for n in sizes) or "only 1"


def _check_length(length: int | None, variable: bool, ranks: int) -> None:
    if length is None and not variable:
        raise ConfigError(f"[{_LABEL}] seq_length_is_variable is False, so seq_length must be given")
    if length is not None and length % ranks:
        raise ConfigError(f"[{_LABEL}] seq_length {length} is not divisible by sequence_parallel_size {ranks}")


def _check_model(model: nn.Module) -> None:
    if not any(getattr(module, "is_causal", False) is True for module in model.modules()):
        raise ConfigError(
            f"[{_LABEL}] {type(model).__name__} has no causal attention that Transformers looks up; not served"
        )
    inner = [m for m in model.modules() if hasattr(m, "_supports_attention_backend")]
    if inner and not any(m._supports_attention_backend for m in inner):
        raise ConfigError(
            f"[{_LABEL}] {type(inner[0]).__name__} does not look its attention up in Transformers' "
            "ALL_ATTENTION_FUNCTIONS; not served"
        )
