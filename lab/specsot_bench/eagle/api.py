"""`Eagle`: generates with a target and its draft model in memory, from token ids, by sync calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from specsot.core.tree import Tree
from specsot.errors import InvalidRequest
from specsot.members import AS_PUBLISHED, Overrides
from specsot_bench.core.eagle_inputs import EagleConfig, Ids, read_batch
from specsot_bench.eagle.generation import (
    EagleBenchmark,
    EagleStats,
    Generation,
    GenerationLimits,
    Piece,
    Prompts,
    measure,
    open_loop,
    openings_of,
)
from specsot_bench.eagle.models import LoadOptions, TargetAndDraft, load_models
from specsot_bench.tree_functions import TreeArrays, arrange_trees

# Tokens. Default length of an answer.
MAX_NEW_TOKENS = 128
# Configuration of `Eagle` if none is given.
DEFAULT = EagleConfig()


class Eagle:
    """Speculative decoding that writes what the target alone would write, whatever the draft. Exact in fp32.

    At temperature 0 the tokens are those of greedy decoding; above, they are a function of (logits, seed,
    number in the batch, position).
    """

    def __init__(
        self,
        draft: Any,
        target: Any,
        config: EagleConfig = DEFAULT,
        *,
        dtype: str | None = None,
        device: str | None = None,
        allow_pickle_bin: bool = False,
        overrides: Overrides = AS_PUBLISHED,
    ) -> None:
        """Load the models, or keep those that are in memory.

        InvalidRequest is also raised if the config's `topk` is more than the number of tokens that the head
        can draft.

        draft: An EAGLE head: its directory, or a loaded head; None decodes without drafts.
        target: A directory in the Hugging Face layout, a `Decoder` of all layers, or a Transformers model in
            memory, whose dtype and device are then kept.
        config: Configuration of trees and sampling.
        dtype: Data type for a directory, such as "fp16"; None is "auto".
        device: Torch device for a directory; None is the CPU.
        allow_pickle_bin: True: pytorch_model.bin is read, too, for its tensors alone.
        overrides: Settings that replace those of the head's config.
        Raises ModelError, HeadMismatch, InvalidRequest.
        """
        self.config = config
        self._models = load_models(draft, target, LoadOptions(dtype, device, allow_pickle_bin, overrides))
        head = self._models.draft
        if head is not None and config.topk > head.draft_vocab:
            raise InvalidRequest(f"topk is {config.topk}, the head drafts {head.draft_vocab} tokens", "topk")

    def generate(
        self,
        input_ids: Any,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        attention_mask: Any = None,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        on_piece: Callable[[Piece], object] | None = None,
    ) -> tuple[Ids, EagleStats]:
        """Return the prompts followed by the new tokens of each, and the statistics.

        InvalidRequest is raised for malformed ids, a token outside of the vocabulary, a maximum below 1, a
        seed outside of [0, 2**63), and a prompt that does not fit the model's positions together with its
        answer. The end token is part of what is returned.

        input_ids: One prompt or several: a tensor [tokens] or [sequences, tokens] gives a tensor, padded with
            `pad_token_id`; lists of any lengths give lists.
        max_new_tokens: Maximum number of new tokens of each sequence, at least 1.
        attention_mask: Mask of the shape of input_ids, 0 where it is padding; None: nothing is padding.
        seed: Seed of all draws; None draws a seed, which the statistics contain.
        eos_token_id: Token ids that end a sequence; None takes the model's; () never stops.
        pad_token_id: Token id that fills a returned tensor; None takes the first end token, or 0 if there is
            none.
        on_piece: Called with every piece as it is written; None: nothing is called.
        Raises InvalidRequest before anything is computed.
        """
        batch = read_batch(input_ids, attention_mask, self._models.target.config.vocab)
        generation = self._write(batch.prompts, max_new_tokens, seed, eos_token_id)
        for piece in generation.pieces():
            if on_piece is not None:
                on_piece(piece)
        pad_token = pad_token_id if pad_token_id is not None else (*self._stops(eos_token_id), 0)[0]
        return batch.extended(generation.tokens, pad_token), generation.stats

    def stream(
        self,
        input_ids: Any,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        attention_mask: Any = None,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Iterator[Piece]:
        """Yield pieces while they are written; leaving the loop stops the generation.

        The prompts are not among the pieces.

        input_ids: One prompt or several, as for `generate`.
        max_new_tokens: Maximum number of new tokens of each sequence, at least 1.
        attention_mask: Mask of the shape of input_ids, 0 where it is padding; None: nothing is padding.
        seed: Seed of all draws; None draws a seed.
        eos_token_id: Token ids that end a sequence; None takes the model's; () never stops.
        Raises InvalidRequest at once.
        """
        batch = read_batch(input_ids, attention_mask, self._models.target.config.vocab)
        return self._write(batch.prompts, max_new_tokens, seed, eos_token_id).pieces()

    def benchmark(
        self,
        data: Sequence[Any],
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        batch_size: int = 1,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> EagleBenchmark:
        """Compare speculation with decoding of the same target without drafts, on these prompts.

        One pass of each over the first batch comes first and does not count. The last batch may be smaller.

        data: Prompts as token ids; each entry is one prompt or several.
        max_new_tokens: Maximum number of new tokens of each sequence.
        batch_size: Number of prompts that are written at once, at least 1.
        seed: Seed of all draws.
        eos_token_id: Token ids that end a sequence; None takes the model's; () never stops.
        Raises InvalidRequest if there are no prompts, or an argument is impossible.
        """
        vocabulary = self._models.target.config.vocab
        prompts = [prompt for entry in data for prompt in read_batch(entry, None, vocabulary).prompts]
        if not prompts or batch_size < 1:
            raise InvalidRequest("data must hold prompts, and batch_size be >= 1", "data")
        batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
        run = partial(self._run, max_new_tokens=max_new_tokens, seed=seed, eos_token_id=eos_token_id)
        return measure(
            batches, partial(run, self._models), partial(run, self._models.plain), self.config.num_steps
        )

    def propose(self, input_ids: Any, *, attention_mask: Any = None, seed: int = 0) -> TreeArrays:
        """Return the trees drafted after each prompt and the target's next token, for callers who verify the
        trees themselves.

        The tensors are on the target's device; see `specsot_kernels`. The config determines the mask's
        layout.

        Room for `num_steps` + 2 more tokens is required in the model's positions.

        input_ids: Prompts as token ids, one or several.
        attention_mask: Mask of the shape of input_ids, 0 where it is padding; None: nothing is padding.
        seed: Seed of the draw of the next token.
        Raises InvalidRequest if no draft is loaded, or a prompt is impossible.
        """
        if self._models.draft is None:
            raise InvalidRequest("nothing can be proposed without a draft", "draft")
        batch = read_batch(input_ids, attention_mask, self._models.target.config.vocab)
        limits = GenerationLimits(self.config.num_steps + 2, seed)
        self._check_room(batch.prompts, limits.limit)
        orders = openings_of(batch.prompts, self.config, limits, with_drafter=True)
        loop = open_loop(self._models, self.config.shape, orders, sum(map(len, batch.prompts)))
        loop.turn()
        return self._arranged([loop.trees[sequence] for sequence in range(len(orders))], batch.prompts)

    def _arranged(self, trees: Sequence[Tree], prompts: Prompts) -> TreeArrays:
        """Return the trees as tensors.

        The arrays have one row for each prompt, in the order of the prompts.

        trees: Drafted tree of each prompt, all of the same size.
        prompts: Token ids of each prompt; a prompt's length is the position of its root.
        """
        device = self._models.target.device
        tokens = torch.tensor([tree.tokens for tree in trees], device=device)
        parents = torch.tensor([(-1, *tree.parents[1:]) for tree in trees], device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        return arrange_trees(tokens, parents, lengths, self.config.tree_mask_mode)

    def _write(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        seed: int | None,
        eos_token_id: int | Sequence[int] | None,
    ) -> Generation:
        """Start a generation; without a seed, draw one.

        prompts: Token ids of each prompt.
        max_new_tokens: Maximum number of new tokens of each sequence.
        seed: Seed of all draws; None draws a seed.
        eos_token_id: Token ids that end a sequence; None takes the model's; () never stops.
        Raises InvalidRequest for an impossible value.
        """
        return self._start(
            self._models,
            prompts,
            max_new_tokens,
            secrets.randbits(63) if seed is None else seed,
            eos_token_id,
        )

    def _run(
        self,
        models: TargetAndDraft,
        prompts: Prompts,
        max_new_tokens: int,
        seed: int,
        eos_token_id: int | Sequence[int] | None,
    ) -> EagleStats:
        """Run a generation to its end, and return its statistics.

        models: Target and draft.
        prompts: Token ids of each prompt.
        max_new_tokens: Maximum number of new tokens of each sequence.
        seed: Seed of all draws.
        eos_token_id: Token ids that end a sequence; None takes the model's; () never stops.
        Raises InvalidRequest for an impossible value.
        """
        generation = self._start(models, prompts, max_new_tokens, seed, eos_token_id)
        for _ in generation.pieces():
            pass
        return generation.stats

    def _start(
        self,
        models: TargetAndDraft,
        prompts: Prompts,
        max_new_tokens: int,
        seed: int,
        eos_token_id: int | Sequence[int] | None,
    ) -> Generation:
        """Start a generation.

        A bool, or a float without a fraction, is no integer here and raises. A prompt that leaves no room
        for its answer raises as well.

        models: Target and draft.
        prompts: Token ids of each prompt.
        max_new_tokens: Maximum number of new tokens of each sequence, at least 1.
        seed: Seed of all draws, from 0 to 2**63 - 1.
        eos_token_id: Token ids that end a sequence; None takes the model's; () never stops.
        Raises InvalidRequest for an impossible value.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise InvalidRequest(
                f"max_new_tokens must be an integer > 0, got {max_new_tokens!r}", "max_new_tokens"
            )
        if not 0 <= seed < 2**63:
            raise InvalidRequest(f"seed must be in [0, 2**63), got {seed}", "seed")
        self._check_room(prompts, max_new_tokens)
        return Generation(
            models, self.config, prompts, GenerationLimits(max_new_tokens, seed, self._stops(eos_token_id))
        )

    def _check_room(self, prompts: Prompts, max_new_tokens: int) -> None:
        """Raise InvalidRequest if a prompt and its answer do not fit the model's positions.

        The error names the first such prompt by its index.

        prompts: Token ids of each prompt.
        max_new_tokens: Maximum number of new tokens of each sequence.
        """
        positions = self._models.target.config.max_positions
        for index, prompt in enumerate(prompts):
            if len(prompt) + max_new_tokens > positions:
                raise InvalidRequest(
                    f"input_ids[{index}] has {len(prompt)} tokens; {max_new_tokens} more do not fit the "
                    f"model's {positions} positions",
                    "max_new_tokens",
                )

    def _stops(self, eos_token_id: int | Sequence[int] | None) -> tuple[int, ...]:
        """Return the token ids that end a sequence.

        The result is empty if nothing ends a sequence.

        eos_token_id: One token id or several; None takes the model's.
        """
        if eos_token_id is None:
            return self._models.target.config.eos
        return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
