"""What the loop needs of a model that is served; the weights are the runner's."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from promptmill.core.models import ModelCard


@dataclass(frozen=True, slots=True)
class ServedModel:
    card: ModelCard
    tokenizer: Tokenizer
