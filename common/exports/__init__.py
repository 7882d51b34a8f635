"""Trained models in folders of their own, which leave the federation: written, read, and called from Python."""

from common.exports.description import Description, read_description
from common.exports.model import TrainedModel, load_model
