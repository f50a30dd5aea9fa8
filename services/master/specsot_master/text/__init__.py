"""Text and tokens of one model: encode, decode, chat template, stop strings.

Refuses to know requests, prompts and models' weights.
"""

from specsot_master.text.detokenizer import Detokenizer
from specsot_master.text.stops import StopStrings
from specsot_master.text.template import ChatTemplate, TemplateRefused
from specsot_master.text.tokenizer import Text

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "TemplateRefused", "Text"]
