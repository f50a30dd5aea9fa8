"""Generated from protos/specsot/v1 by `make protos`; do not edit. Knows nothing of the code around it."""
