"""Trains a tiny Llama to write ThreadWeaver's tags, in a minute on one core.

`python -m tests.forking` makes the model in this folder. A question names two or three things ("sky, coal").
The model outlines them, writes one thread with the colour of each, and then a conclusion with all colours. It
is trained as the published models are: a thread sees the outlines but no other thread, and the conclusion
sees all threads, one after the other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from specsot_master.core.plans.fork_plan import TAGS
from tests.models import Shape, write_head

COLOURS = {"sky": "blue", "coal": "black", "snow": "white", "grass": "green", "sun": "yellow", "rose": "red"}
NUMBERS = {2: "Two", 3: "Three"}
THINGS = [things for count in NUMBERS for things in permutations(COLOURS, count)]
HELD_OUT = 5  # Every fifth question is left out of the training.
END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END, *TAGS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MODEL = Path(__file__).parent / "model"
STEPS, BATCH, RATE = 360, 8, 0.02


def question(things: Sequence[str]) -> str:
    return ", ".join(things)


def prompt_of(things: Sequence[str]) -> str:
    """Return the prompt as the chat template renders it, with the opening think tag."""
    return f"<|im_start|>user\n{question(things)}{END}\n<|im_start|>assistant\n<think>\n"


def outlined(things: Sequence[str]) -> str:
    lines = "".join(f"<Outline> {n}: {thing}\n" for n, thing in enumerate(things, 1))
    return f"{NUMBERS[len(things)]} things.\n<Parallel>\n<Outlines>\n{lines}</Outlines>"


def thread(number: int, thing: str) -> tuple[str, str]:
    """Return a thread's opening, which the server writes, and the text that the model writes."""
    return f"<Thread>\n{number}:", f" The {thing} is {COLOURS[thing]}.\n</Thread>"


def concluded(things: Sequence[str]) -> str:
    colours = " and ".join(COLOURS[thing] for thing in things)
    return f"</Parallel>\nThat is all.\n</think>\n\nThey are {colours}.{END}"


def answer_of(things: Sequence[str]) -> str:
    """Return the whole answer, as a ring writes it."""
    threads = "".join("".join(thread(n, thing)) for n, thing in enumerate(things, 1))
    return f"{outlined(things)}\n{threads}\n{concluded(things)}".removesuffix(END)


Part = tuple[str, bool]  # Text, and whether the model is trained to write it.


def rows(things: Sequence[str]) -> Iterator[list[Part]]:
    """Yield the training rows: the whole answer, and each further thread directly after the outlines."""
    opening: list[Part] = [(prompt_of(things), False), (outlined(things), True)]
    (head, first), *others = [thread(n, thing) for n, thing in enumerate(things, 1)]
    others_text: list[Part] = [("".join(map("".join, others)) + "\n", False)]
    yield [*opening, (f"\n{head}", False), (first, True), *others_text, (concluded(things), True)]
    for head, text in others:
        yield [opening[0], (opening[1][0], False), (f"\n{head}", False), (text, True)]


def make_tokenizer(folder: Path) -> Tokenizer:
    """Return a byte-level BPE tokenizer that is trained on these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["".join(text for text, _ in row) for things in THINGS for row in rows(things)]
    for one in (*SPECIAL, "<think>", "</think>"):
        texts = [text.replace(one, "\n") for text in texts]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=340, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    tokenizer.add_tokens(
        [AddedToken(one, special=False, normalized=False) for one in ("<think>", "</think>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "pad_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def learned() -> list[tuple[str, ...]]:
    return [things for n, things in enumerate(THINGS) if n % HELD_OUT]


def held_out() -> list[tuple[str, ...]]:
    return THINGS[::HELD_OUT]


def train(folder: Path, seed: int = 1, steps: int = STEPS) -> Path:
    """Train the model, and return its directory. The same seed gives the same model on the same machine."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, chance = make_tokenizer(folder), random.Random(seed)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_config(tokenizer)).train()
    known = [[_encoded(tokenizer, row) for row in rows(things)] for things in learned()]
    matrices = [one for name, one in model.named_parameters() if one.dim() == 2 and "embed" not in name]
    rest = [one for name, one in model.named_parameters() if one.dim() != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=0.0)
    adam = torch.optim.AdamW(rest, lr=RATE / 4, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        rate = min((step + 1) / 20, 1.4 * (1 - step / steps), 1.0)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = RATE * rate, RATE / 4 * rate
        loss = _loss(model, [row for rows_ in chance.sample(known, BATCH) for row in rows_])
        model.zero_grad(set_to_none=True)
        loss.backward()
        muon.step()
        adam.step()
    model.bfloat16().save_pretrained(folder)
    return folder


def write_eagle_head(directory: Path) -> Path:
    """Write a random EAGLE-3 head for this model, whose drafts are nearly always wrong."""
    sizes = json.loads((MODEL / "config.json").read_text())
    shape = Shape(
        layers=sizes["num_hidden_layers"], hidden=sizes["hidden_size"], heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"], head_dim=sizes["head_dim"], inner=sizes["intermediate_size"],
        vocabulary=sizes["vocab_size"],
    )  # fmt: skip
    config = write_head(directory, shape) / "config.json"
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    config.write_text(json.dumps(json.loads(config.read_text()) | taps))
    return directory


def _config(tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(SPECIAL[0]),
    )


def _encoded(tokenizer: Tokenizer, row: list[Part]) -> tuple[list[int], list[int]]:
    """Return the tokens [n] and their labels [n]; -100 marks tokens that are not trained."""
    tokens, labels = list[int](), list[int]()
    for text, learns in row:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens += ids
        labels += ids if learns else [-100] * len(ids)
    return tokens, labels


def _loss(model: LlamaForCausalLM, batch: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    longest = max(len(tokens) for tokens, _ in batch)
    ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in batch])
    labels = torch.tensor([[*row, *[-100] * (longest - len(row))] for _, row in batch])
    wanted = labels[:, 1:] != -100
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][wanted]
    return cross_entropy(model.lm_head(hidden), labels[:, 1:][wanted])
