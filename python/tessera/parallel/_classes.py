"""Facts of a class that no weight says: how its models take their loss, and what its attention modules call their
numbers of heads. Known for Transformers' models; given for other classes by register_class()."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from tessera.errors import ConfigError

_RULE = "_tessera_class_rule"  # on classes: ClassRule
_Class = TypeVar("_Class", bound=type[nn.Module])

# Names of Transformers: where loss_function finds a loss, models that ask for it, and models that do not ask.
_SLOT = "_loss_function"
_ASKS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ModelWithLMHead")
_ASKS_NOT = tuple(
    """
    BartFor BigBirdPegasusFor BlenderbotFor BlenderbotSmallFor Blip2For BlipFor BlipTextLMHeadModel ClvpFor ClvpModelFor
    CpmAntFor FSMTFor FalconMambaFor FlaubertWithLMHeadModel Gemma3ForConditional Gemma3nForConditional
    Gemma4AssistantFor Gemma4UnifiedAssistantFor GraniteSpeechFor GraniteSpeechPlusFor Kosmos2For Kosmos2_5For LEDFor
    Llama4ForConditional LongT5For M2M100For MBartFor MT5For MambaFor MarianFor ModernBertDecoderFor MoshiForConditional
    MusicgenFor MusicgenMelodyFor MvpFor NllbMoeFor PI0For PLBartFor PegasusFor PegasusXFor Pix2StructFor Pop2PianoFor
    ProphetNetFor Qwen2AudioFor Qwen2_5OmniTalkerFor SeamlessM4TTextToUnitFor SeamlessM4Tv2TextToUnitFor Speech2TextFor
    SwitchTransformersFor T5For TrOCRFor UMT5For UdopFor VoxtralFor WhisperFor XLMWithLMHeadModel XLNetLMHeadModel
    xLSTMFor
    """.split()  # noqa: SIM905
)


@dataclasses.dataclass(frozen=True)
class ClassRule:
    loss: str | None = None  # the attribute that forward() calls for the loss
    heads: str | None = None  # the attribute that counts query heads
    key_heads: str | None = None  # and key/value heads
    widths: tuple[str, ...] = ()  # other attributes that are cut with the heads

    def counts(self) -> list[str]:
        return [name for name in (self.heads, self.key_heads, *self.widths) if name is not None]


def register_class(
    cls: _Class,
    *,
    loss: str | None = None,
    heads: str | None = None,
    key_heads: str | None = None,
    widths: Sequence[str] = (),
) -> _Class:
    """Says of a class what tensor parallelism cannot see in its weights; returns the class. That holds for subclasses,
    too, that have no forward() of their own. Local; before the model is cut, on every rank alike.

    For a model, `loss`: the attribute that forward() calls for its loss, as Transformers' models call loss_function:
    `loss(logits=..., labels=..., vocab_size=..., ignore_index=..., shift_labels=..., num_items_in_batch=...)`, of
    which only the first two must be given. With vocab_parallel_lm_head it gets this rank's slice of the logits
    [.., vocabulary], whole labels [..], which it shifts, and returns the mean. None: forward() needs whole logits.
    For an attention module, `heads`: the integer attribute that counts query heads; `key_heads`: key/value heads, where
    there are fewer; `widths`: others that are a multiple of the heads. While the model is cut they have this rank's
    values. ConfigError for what is no class of modules, or no name."""
    names = [name for name in (loss, heads, key_heads, *widths) if name is not None]
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"[register_class] {cls!r} is no class of modules")
    if isinstance(widths, str) or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise ConfigError(f"[register_class] {cls.__name__}: these must be names of attributes: {names!r:.200}")
    setattr(cls, _RULE, ClassRule(loss, heads, key_heads, tuple(widths)))
    return cls


def rule_of(cls: type) -> ClassRule | None:
    """The rule of the class, or of the class whose forward() it has."""
    for base in cls.__mro__:
        if _RULE in vars(base):
            rule: ClassRule = vars(base)[_RULE]
            return rule
        if "forward" in vars(base):
            return None
    return None


def number_at(module: nn.Module, name: str) -> int:
    """ConfigError where a registered attribute is no count."""
    value = getattr(module, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"[register_class] {type(module).__name__}.{name} must be a positive integer, got {value!r:.100}"
        )
    return value


def loss_of(model: nn.Module) -> tuple[bool, str | None]:
    """Whether it is known how forward() takes its loss; and the attribute that forward() calls with the logits, None
    where it needs whole logits."""
    rule = rule_of(type(model))
    if rule is not None:
        if rule.loss is not None and not callable(getattr(model, rule.loss, None)):
            raise ConfigError(f"[register_class] {type(model).__name__}.{rule.loss} cannot be called as a loss")
        return True, rule.loss
    forward = inspect.unwrap(type(model).forward)
    owner = forward.__qualname__.rpartition(".")[0]
    if not forward.__module__.startswith("transformers.models.") or not owner.endswith(_ASKS):
        return False, None
    if owner.startswith(_ASKS_NOT):
        return True, None
    loss = getattr(model, "loss_function", None)
    name = (getattr(loss, "__module__", ""), getattr(loss, "__qualname__", ""))
    causal = name == ("transformers.loss.loss_utils", "ForCausalLMLoss")
    return causal, _SLOT if causal else None
