"""Names the fields of other servers that would change an answer and are not served here.

A body that has one of them is refused by the field's name, unless its value changes nothing. The sources are
the request schemas of OpenAI, vLLM, SGLang, llama.cpp, Ollama and text-generation-webui, and of the systems
that are named below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from specsot_master.chat_template import THINKING_OFF

# Unknown fields of one body that are checked one by one. A body may hold millions.
MAX_CHECKED_FIELDS = 64

# From the names of fields to their values that change nothing and are accepted.
Idle = Mapping[str, tuple[Any, ...]]

# From the names of llama.cpp and Ollama to those of OpenAI and vLLM.
OTHER_NAMES: Mapping[str, str] = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}

# Older vLLM named everything about the form of an answer with this prefix. The body's schema has the three
# such fields that are served; any other name with it is refused.
_GUIDED = "guided_"
# Characters of that prefix.
_PREFIX = len(_GUIDED)

# Fields for the form of an answer, or for its length.
_UNSERVED_FORMS: Idle = {
    "ebnf": ("",),
    "grammar": ("",),
    "guided_decoding_backend": ("",),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": (),
    # These remain in a body only if it also has our own names.
    **dict.fromkeys(OTHER_NAMES, ()),
    "prefix": (False, ""),
    "structural_tag": (),
}

# Fields that sample, rank or stop in ways that are not served. Parameters that only matter together with one
# of them, such as mirostat_tau, are in `WITHOUT_EFFECT`.
_UNSERVED_SAMPLING: Idle = {
    "adaptive_target": (-1, -1.0),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "custom_logit_processor": (),
    "do_sample": (True,),
    "dry_multiplier": (0, 0.0),
    "dynamic_temperature": (False,),
    "dynatemp_range": (0, 0.0),
    "encoder_repetition_penalty": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "guidance_scale": (1, 1.0),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logits_processor_pattern": (),
    "lora": ([],),
    "lora_path": (),
    "min_keep": (0, 1),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_indent": (0,),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0, 0.0),
    "sampling_seed": (),
    "smoothing_factor": (0, 0.0),
    "stop_regex": ([], ""),
    "t_max_predict_ms": (0, -1),
    "tfs": (1, 1.0),
    "tfs_z": (1, 1.0),
    "top_a": (0, 0.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "typical": (1, 1.0),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "watermark": (False,),
    "xtc_probability": (0, 0.0),
}

# Fields of the prompt, of the response, and of what a server runs around the model.
_UNSERVED_OTHERS: Idle = {
    "add_generation_prompt": (True,),
    "audio": (),
    "cache_salt": ("",),
    "chat_template": (),
    "chat_template_kwargs": ({}, *({name: off} for name, off in THINKING_OFF.items()), THINKING_OFF),
    "continue_final_message": (False,),
    "context": ([],),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "image_data": ([],),
    "images": ([],),
    "input_extra": ([],),
    "input_prefix": ("",),
    "input_suffix": ("",),
    "kv_transfer_params": ({},),
    "logprob_token_ids": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "negative_prompt": ("",),
    "no_stop_trim": (False,),
    "options": ({},),
    "prompt_logprobs": (),
    "raw": (False,),
    "reasoning_effort": ("none",),
    "repetition_detection": ({},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_params": ({},),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "template": ("",),
    "think": (False,),
    "thinking_token_budget": (0,),
    "truncate": (),
    "truncate_prompt_tokens": (),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

# Fields of Anthropic's and OpenAI's other endpoints, of Mistral, Qwen, DeepSeek, Gemini, OpenRouter, xAI,
# Hugging Face, TensorRT-LLM and koboldcpp.
_UNSERVED_ELSEWHERE: Idle = {
    "assistant_prefix": ("",),
    "bad_words_ids": ([],),
    "ban_eos_token": (False,),
    "banned_strings": ([], ""),
    "banned_tokens": ([], ""),
    "begin_suppress_tokens": ([],),
    "candidate_count": (1,),
    "custom_token_bans": ("", []),
    "diversity_penalty": (0, 0.0),
    "enable_search": (False,),
    "enable_thinking": (False,),
    "force_words_ids": ([],),
    "generationConfig": ({},),
    "grammar_string": ("",),
    "input": (),
    "instructions": ("",),
    "json_mode": (False,),
    "json_object": (False,),
    "logit_bias_type": ("input_ids",),
    "max_gen_len": (),
    "max_length": (),
    "max_output_tokens": (),
    "max_thinking_tokens": (),
    "max_tokens_to_sample": (),
    "min_length": (0,),
    "num_return_sequences": (1,),
    "output_config": ({},),
    "output_format": (),
    "penalize_nl": (False,),
    "prefill": ("",),
    "previous_response_id": (),
    "prompt": (),
    "prompt_mode": (),
    "random_seed": (),
    "reasoning": ({}, {"enabled": False}, {"effort": "none"}),
    "return_full_text": (False,),
    "safe_prompt": (False,),
    "sampler_seed": (-1,),
    "search_parameters": ({"mode": "off"},),
    "sequence_bias": ({}, []),
    "stop_sequences": ([],),
    "stop_words": ([], ""),
    "suppress_tokens": ([],),
    "system": ("", []),
    "system_instruction": ("",),
    "system_prompt": ("",),
    "text": ({}, {"format": {"type": "text"}}),
    "thinking": ({"type": "disabled"},),
    "thinking_budget": (0,),
}

# All fields that are known and not served by chat and text completions.
UNSERVED: Idle = {**_UNSERVED_FORMS, **_UNSERVED_SAMPLING, **_UNSERVED_OTHERS, **_UNSERVED_ELSEWHERE}

# Fields that change no answer here, and are ignored without a log entry: they only matter if another field of
# `UNSERVED` is on, or if a prompt that is too long were cut instead of refused.
WITHOUT_EFFECT = frozenset(
    {
        *("adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("dynatemp_exponent", "dynatemp_low", "dynatemp_high", "early_stopping", "mirostat_eta"),
        *("mirostat_tau", "n_discard", "n_keep", "num_keep", "post_sampling_probs", "smoothing_curve"),
        "xtc_threshold",
    }
)

# llama.cpp's and Ollama's names for the number of last tokens that penalties count. Here, penalties count all
# tokens (WHOLE_TEXT), so that another number matters if a penalty is set.
WINDOWS_OF_PENALTIES = ("repeat_last_n", "penalty_last_n")
# Tokens. Stands for all tokens in these fields.
WHOLE_TEXT = -1

# Fields of chat completions for the form of an answer.
FORMS: Idle = {
    **_UNSERVED_FORMS,
    **dict.fromkeys(("json_schema", "regex", "response_format", "structured_outputs"), ()),
    **dict.fromkeys(("guided_choice", "guided_json", "guided_regex"), ()),
    "format": ("",),
}

# Fields that chat completions know, served or not, for which other endpoints have their own names, or none.
# An endpoint's own fields never get here, because only unknown fields are looked up.
FOREIGN: Idle = {
    **UNSERVED,
    **FORMS,
    "frequency_penalty": (0, 0.0),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "seed": (),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
}

# The fields to use instead of some unserved ones.
INSTEAD: Mapping[str, str] = {
    "ban_eos_token": "ignore_eos",
    "candidate_count": "n",
    "ebnf": "regex or json_schema",
    "enable_thinking": "chat_template_kwargs",
    "grammar": "regex or json_schema",
    "grammar_string": "regex or json_schema",
    "guided_grammar": "guided_regex or guided_json",
    "guided_json_object": "response_format",
    "input": "messages or prompt",
    "instructions": "a message of the role system",
    "json_mode": "response_format",
    "json_object": "response_format",
    **dict.fromkeys(("max_gen_len", "max_length", "max_output_tokens", "max_tokens_to_sample"), "max_tokens"),
    "max_thinking_tokens": "thinking_token_budget",
    "min_length": "min_tokens",
    "min_new_tokens": "min_tokens",
    "n_probs": "logprobs",
    "num_return_sequences": "n",
    **dict.fromkeys(("output_config", "output_format", "text"), "response_format"),
    "random_seed": "seed",
    "reasoning": "reasoning_effort",
    "return_full_text": "echo",
    **dict.fromkeys(("sampler_seed", "sampling_seed"), "seed"),
    "stop_sequences": "stop",
    "stop_words": "stop",
    **dict.fromkeys(("system", "system_instruction", "system_prompt"), "a message of the role system"),
    "think": "chat_template_kwargs",
    "thinking": "chat_template_kwargs",
    "thinking_budget": "thinking_token_budget",
    **OTHER_NAMES,
}

# From an unserved field to the field that turns it off with the value "none".
SWITCHES: Mapping[str, str] = {"functions": "function_call"}


def unserved_in(extra: Mapping[str, Any], unserved: Idle) -> Iterator[str]:
    """Yield the name of each unknown field of a body that is not served and would change the answer; nothing
    if there is none. A value that is None, or listed as changing nothing, is accepted. Of all unknown fields,
    the first MAX_CHECKED_FIELDS are searched for further fields with the prefix of guided decoding.

    extra: the unknown fields of a body.
    unserved: the fields that this endpoint does not serve.
    """
    for name, idle in unserved.items():
        value = extra.get(name)
        if value is not None and value not in idle:
            yield name
    for name, value in islice(extra.items(), MAX_CHECKED_FIELDS):
        if name[:_PREFIX] == _GUIDED and name not in unserved and value is not None:
            yield name
