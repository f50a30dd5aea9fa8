"""Loads a worker's layer range, measures it, and makes the stages and verifiers of every epoch."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Final
from weakref import ref

import structlog
import torch

from specsot.checkpoint.borrowed import borrowed_of
from specsot.checkpoint.config import read_config
from specsot.checkpoint.fingerprint import fingerprint
from specsot.checkpoint.hub import snapshot_of
from specsot.checkpoint.kept_vocabulary import vocabulary_of
from specsot.core.frames import Opening
from specsot.core.info import memory_in_words
from specsot.core.vocabulary import Vocabulary
from specsot.errors import ModelError
from specsot.grammar import Grammar, grammar_of, prebuild, sentence_ends
from specsot.members import Configuration, Range, Registration
from specsot.phases import add_phase, note_imported, timed_phase
from specsot.service.compute import idle_seconds
from specsot.service.options import ModelOptions
from specsot.service.runtime_env import return_freed_memory
from specsot.transport.pending_rows import use_device
from specsot_kernels.cpu.compiling import is_compiling
from specsot_model.captured_tokens import CapturedTokens
from specsot_model.cuda_graphs import GraphCapture, compile_steps, measure_rows
from specsot_model.decoder import Decoder, Loaded
from specsot_model.device_speed import alone_on, copy_speed, device_name, measured_bytes
from specsot_model.fp8 import runs_kernels
from specsot_model.kept_speeds import KeptSpeeds, MeasuredSpeeds
from specsot_model.linear import check_quantization, describe_rounding, resolve_dtype
from specsot_model.loaded_parts import AbsentWeights, LoadedParts, measured_range
from specsot_model.memory_fit import Need, check_fit, free_on, gpus_on, tensors_of
from specsot_model.published import PublishedWeights, open_weights
from specsot_model.stored_form import (
    as_published,
    is_quantized_gguf,
    missing_for_packed_kernels,
    uses_packed_kernels,
)
from specsot_model.tensor_parallel import check_split, devices_of
from specsot_model.transformers_layers.interface import RELEASE
from specsot_model.transformers_layers.shapes import layer_shapes
from specsot_model.weights import WeightFiles, Weights
from specsot_worker.feature_ring import FeatureRing
from specsot_worker.memory import LayerMemory
from specsot_worker.penalties import without_tokens
from specsot_worker.sampling import choose_on_device, compile_draws
from specsot_worker.stage import DecoderStage
from specsot_worker.stage_provider import StageRunner
from specsot_worker.verifier import Verifier

log = structlog.get_logger()

# Seconds. How often the number of compiled kernels is logged. Untuned.
REPORT_SECONDS: Final = 2.0
# Rows. One number of rows for each kernel of the lm_head: for one row, up to 16, to 32, to 64, and more.
LOGITS_ROWS: Final = (1, 2, 17, 33, 65)


class StageLoader:
    """Loader of a worker's layer ranges. The last range stays loaded, so that a new epoch starts at once; for
    another range, only the layers that are missing are loaded.

    loaded: Number of layers of the range requested last that are loaded. Another thread may read it.
    """

    def __init__(
        self,
        options: ModelOptions,
        name: str,
        address: str | None = None,
        layers: Range | None = None,
        loaded: Loaded | None = None,
        free_memory: Callable[[str], int | None] = free_on,
        gpus: Callable[[str], dict[str, str]] = gpus_on,
        prepare_frame: Callable[[], None] | None = None,
    ) -> None:
        """Read the model's configuration. On a GPU, load one layer and begin to compile its kernels, so that
        these are compiled together with the kernels of a drafter in this process. Nothing else is loaded yet.

        options: Model and device.
        name: Name of the worker.
        address: Where other members reach the worker. None: by its name.
        layers: Layer range to run. None: the master decides.
        loaded: Called after every layer that has been loaded, with the number of layers of the range that are
            loaded by then. None: nothing is called.
        free_memory: Maps the name of a device, such as cuda:0, to its free bytes, or to None if unknown.
        gpus: Maps a device option, such as cuda, to the names of the devices that it may stand for, by GPU
            id.
        prepare_frame: Called before a stage runs each frame. None: nothing is called.

        Raises InvalidRequest for an unknown quantization, and if the model cannot be split over
        `tensor_parallel` devices, or if there are too few of them. Raises ModelError if the packages that a
        quantization needs are missing, if a family that our decoder does not know cannot run over layer
        ranges, if `layers` are beyond the model's layers, and if they cannot be a stage because layers read
        the keys and values of others, see `ModelConfig.why_not_split`.
        """
        self._options = options = as_published(options, options.base)
        self._name = name
        self._address = address or name
        self._layers = layers
        self._on_layer = loaded
        self._prepare_frame = prepare_frame
        self._free_memory = free_memory
        self._device = options.device
        self._config = read_config(options.base)
        note_imported()
        # The first use of a GPU makes its CUDA context, which takes long enough to be a phase of its own. The
        # free bytes are read only for that, and dropped.
        with timed_phase("opened the device", device=options.device):
            self._gpus = gpus(options.device)
            use_device(options.device)
            self._free()
        if self._config.transformers is not None:
            layer_shapes(self._config)
        self._dtype = resolve_dtype(options.dtype, options.device, options.stored_form)
        check_quantization(options.stored_form, options.device)
        check_split(self._config, options.tensor_parallel, options.stored_form, options.batch_invariant)
        devices_of(options.device, options.tensor_parallel)
        self._fingerprint = fingerprint(options.base)
        self._decoder: Decoder | None = None
        self._parts = LoadedParts()
        self._absent: AbsentWeights | None = None
        # Bytes that loading ahead leaves free. None until loading ahead has started.
        self._preload_floor: int | None = None
        # Taps of the draft head whose slices the stages have, perhaps since an earlier epoch.
        self._taps: tuple[int, ...] = ()
        # The stage of the newest epoch, which holds its KV pages as long as it exists, and their bytes.
        self._stage: Callable[[], DecoderStage | None] = lambda: None
        self._stage_pages = 0
        # The layer whose kernels the constructor began to compile. None: kernels are compiled when a layer is
        # measured.
        self._compiled: Range | None = None
        # See `StageProvider.loaded`.
        self.loaded = 0
        if layers and layers.last > self._config.layers:
            raise ModelError(
                f"layers {layers} were requested, but {options.base} has {self._config.layers} layers"
            )
        if layers and (reason := self._config.why_not_split(layers.first, layers.last)):
            raise ModelError(f"{options.base}: {reason}")
        if runs_kernels(torch.device(options.device)):
            self._begin_compiling()

    def _begin_compiling(self) -> None:
        """Load one layer, and begin to compile the kernels of all steps over such layers. If it is the
        model's last layer, also begin to compile the kernels of the lm_head and those that draw tokens.
        `_measure` waits for all of these kernels.

        The loaded layer is the last one of the range, because the lm_head is loaded together with the model's
        last layer. Nothing happens if the weights are still to be fetched, or if the layer reads the keys of
        another layer; then the kernels are compiled when a layer is measured.

        Raises ModelError if the device has too little free memory for the layer.
        """
        last = (self._layers or Range(0, self._config.layers)).last
        layer = Range(last - 1, last)
        self._check_room_to_measure(layer)
        if isinstance(self._files(), AbsentWeights) or self._config.kv_source(last - 1) < last - 1:
            return
        self._compiled = layer
        with timed_phase("loaded one layer"):
            decoder = self._load_decoder(layer)
        with timed_phase("began to compile kernels", what="steps"):
            compile_steps(decoder)
            if decoder.capturable and last == self._config.layers:
                _compile_logits(decoder)

    @property
    def name(self) -> str:
        """Name of the worker."""
        return self._name

    @property
    def fetched(self) -> int:
        """Number of bytes of the weights that have been downloaded or borrowed so far. 0 if the weights are
        files of this machine.
        """
        base = self._options.base
        borrowed = borrowed_of(base)
        snapshot = snapshot_of(base)
        return borrowed.stored if borrowed else snapshot.stored if snapshot else 0

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model."""
        return self._config.vocab

    def registration(self) -> Registration:
        """Measure one layer (of the range, if it is fixed), which takes a fraction of a second, and return
        what the master is to know of this worker: its memory, speed, layers and device.

        Raises ModelError if there is no room for the fixed range.

        Without a fixed range, the vocabulary is read now. A model with routed experts reports a copy speed
        of 0. `hands_over` is False for a model with recurrent states and for tensor parallelism; `lends` is
        False for borrowed weights and for the format bin.
        """
        config = self._config
        memory = self._memory()
        hands_over = not config.delta and not config.wide and self._options.tensor_parallel == 1
        if self._layers:
            graphs = self._graph_bytes(self._layers)
            self._check_fit(self._layers, self._options.page_bytes, graphs, self._held_pages)
        if self._layers is None:
            self._read_vocabulary()
        self._report_published()
        self._report_transformers()
        speeds = self._measure()
        return Registration(
            kind="worker",
            name=self._name,
            address=self._address,
            fingerprint=self._fingerprint,
            model_layers=config.layers,
            max_positions=config.max_positions,
            kv_bytes=self._options.page_bytes,
            row_bytes=self._counted.row_in(self._layers),
            layers=self._layers,
            curve=speeds.curve,
            host=socket.gethostname(),
            gpus=tuple(sorted(self._gpus, key=lambda gpu: self._gpus[gpu] != self._device)),
            memory=memory,
            weights=self._counted.parts,
            number_bytes=self._dtype.itemsize,
            device=device_name(self._device),
            dtype=f"{self._dtype}".removeprefix("torch."),
            # With experts, a step reads those that its tokens choose, so the bytes per step are unknown.
            copy_speed=0 if self._config.routing else speeds.copy_speed,
            quantization=self._counted.rounding,
            lends=borrowed_of(self._options.base) is None and self._options.model_format != "bin",
            hands_over=hands_over,
            hidden_bytes=config.hidden * self._dtype.itemsize if hands_over else 0,
        )

    def _report_published(self) -> None:
        """Log in one line how published, quantized weights, or those of a GGUF file of few bits, are held.
        Nothing is logged for other weights, nor for such a GGUF file on a GPU.
        """
        files = self._files()
        base = self._options.base
        if is_quantized_gguf(base) and torch.device(self._device).type == "cpu":
            self._report_gguf()
        whole = Range(0, self._config.layers)
        if isinstance(files, PublishedWeights):
            kept = self._options.stored_form
            numbers = str(self._dtype).removeprefix("torch.")
            log.info(
                "published weights",
                format=str(files.published),
                held=f"as they are: {describe_rounding(kept, self._device)}"
                if kept
                else f"decoded to {numbers}",
                takes=memory_in_words(self._counted.weights(whole)),
                stored=memory_in_words(files.stored),
            )

    def _report_transformers(self) -> None:
        """Log in one line that the layers run through Transformers' own code. Nothing is logged for families
        that our decoder knows.
        """
        if self._config.transformers is not None:
            log.info(
                "layers run through Transformers",
                model_type=self._config.model_type,
                release=RELEASE,
                cuda_graphs="none",
            )

    def _report_gguf(self) -> None:
        """Log in one line how the weights of a GGUF file of few bits are held on a CPU, and why in floats."""
        kept = self._options.stored_form
        if kept:
            log.info("gguf weights", held=describe_rounding(kept, self._device))
            return
        missing = missing_for_packed_kernels()
        reason = f"int8 needs {missing}" if missing else "--quantization or --dtype asks for it"
        log.info("gguf weights", held=str(self._dtype).removeprefix("torch."), reason=reason)

    def _measure(self) -> MeasuredSpeeds:
        """Return how fast memory is copied, and the seconds that one step takes by its number of tokens. They
        are measured on a layer that is loaded, or, while it is unknown which layers to fetch, on a layer of
        the same shape. They are those of an earlier start, if a few steps confirm them.

        Raises ModelError if the device has too little free memory for that.
        """
        self._check_room_to_measure(measured_range(self._config))
        log.info("measuring", what="one layer", device=device_name(self._device))
        files = self._files()
        if self._layers is None and isinstance(files, AbsentWeights):
            options = replace(self._options, device=self._device)
            decoder = Decoder.of(options, measured_range(self._config), files=files)
        else:
            # Measure the layer that is loaded already: any layer takes as long, unless only some have
            # experts.
            loaded = None if self._config.routing else self._compiled
            decoder = self._load(self._layers or loaded or measured_range(self._config))
        packs = uses_packed_kernels(self._options.stored_form, self._device)
        # Load more layers instead of waiting for the kernel, which another process compiles.
        while self._layers is None and packs and is_compiling() and self.preload():
            pass
        if decoder.capturable:
            if not self._compiled:
                compile_steps(decoder)
            _await_kernels()
        kept = self._kept_speeds(decoder)
        known = kept.read()
        with alone_on(self._device), timed_phase("measured", what="one layer") as facts:
            if known is None:
                copy_speed(self._device)
            curve = measure_rows(decoder, known=known.curve if known else ())
            facts["as_before"] = known is not None and curve is known.curve
            if known and curve is known.curve:
                return known
            speeds = MeasuredSpeeds(curve, copy_speed(self._device))
        kept.write(speeds)
        return speeds

    def _kept_speeds(self, decoder: Decoder) -> KeptSpeeds:
        """Return the file of what earlier starts measured on a layer of this model in this form.

        decoder: The layers that are measured.
        """
        options = self._options
        form = self._counted.rounding, options.kv_cache_dtype, options.tensor_parallel
        facts = {"model": self._fingerprint, "layers": decoder.layers, "dtype": self._dtype, "form": form}
        return KeptSpeeds(self._device, **facts)

    def _check_room_to_measure(self, layer: Range) -> None:
        """Raise ModelError if the device has too little free memory for a layer that is measured and for the
        buffers of `copy_speed`. The check passes if the free memory is unknown.

        layer: The layer.
        """
        needed = self._counted.weights(layer) + measured_bytes(self._device)
        free = self._free()
        if free is not None and free < needed:
            raise ModelError(
                f"{self._device} has {memory_in_words(free)} free, and measuring one layer takes "
                f"{memory_in_words(needed)}: stop what else runs there, or choose another --device"
            )

    def make_stage(self, configuration: Configuration, layers: Range) -> DecoderStage:
        """Return the stage of an epoch, with empty pages.

        configuration: The epoch as the master has configured it.
        layers: The layer range to run. Missing layers are loaded.

        Raises ModelError if there is no room for it.

        If the configuration names another GPU, the stage moves there first, and what was loaded elsewhere is
        dropped.
        """
        self._move_to(configuration.gpu)
        fused = configuration.head.width if configuration.head else 0
        pages = self._counted.pages(self._naming_taps(configuration), layers)
        self._check_fit(layers, pages, self._graph_bytes(layers, fused))
        table = configuration.pages, configuration.page_rows
        decoder = self._load(layers)
        with timed_phase("allocated pages"):
            stage = DecoderStage(decoder, *table, configuration.layout, self._prepare_frame)
        self._stage, self._stage_pages = ref(stage), pages
        return stage

    def _naming_taps(self, configuration: Configuration) -> Configuration:
        """Return the configuration with the taps of an earlier epoch, if it names none, so that their memory
        is counted. Only a GPU copies them again; a CPU reads them where they are, and the configuration is
        returned unchanged.

        configuration: The epoch as the master has configured it.

        If the head names taps, they are remembered for later epochs. Without a head, the configuration is
        returned unchanged.
        """
        head = configuration.head
        self._taps = (head.taps if head else ()) or self._taps
        if head is None or head.taps or not self._device.startswith("cuda"):
            return configuration
        return replace(configuration, head=replace(head, taps=self._taps))

    def fetch(self, layers: Range) -> None:
        """Download or borrow the files of these layers. Nothing happens if they are present.

        layers: The layer range.

        How much of borrowed weights was fetched is logged.
        """
        if isinstance(self._files(), AbsentWeights):
            files = WeightFiles(self._options.base, self._options.model_format == "bin")
            files.fetch(tensors_of(files, self._config, layers))
            self._report_fetched(layers)

    def preload(self, layers: Range | None = None) -> bool:
        """Load one more layer. Return whether a layer was loaded: False if all are loaded, or if there is no
        room.

        layers: The layers to load. None: any layers of the model whose files are present, while half of the
            memory that was free at the beginning stays free, and at least the memory of the KV pages.

        Raises ModelError if there is no room for the next of `layers`.

        With None, False is also returned if the weights are still to be fetched, or if the free memory is
        unknown. The present range stays loaded.
        """
        free = self._free()
        range_to_load = layers or Range(0, self._config.layers)
        missing = (
            one for one in range(range_to_load.first, range_to_load.last) if one not in self._parts.blocks
        )
        if (index := next(missing, None)) is None:
            return False
        layer = Range(index, index + 1)
        if layers is None:
            if not self._leaves_room(layer, free) or isinstance(self._files(), AbsentWeights):
                return False
        elif free is not None and free < self._counted.weights(layer):
            raise ModelError(
                f"no room for layer {index} of layers {layers} in addition to the running layers"
            )
        self._load_decoder(layer)
        return True

    def _leaves_room(self, layer: Range, free: int | None) -> bool:
        """Return whether enough memory stays free after loading a layer ahead.

        layer: Range of this one layer.
        free: Free bytes of the device. None: unknown, and the result is False.

        The floor is set at the first call: half of the free bytes, or the bytes of the KV pages if that is
        more.
        """
        if free is None:
            return False
        if self._preload_floor is None:
            self._preload_floor = max(free // 2, self._options.page_bytes)
        return free - self._counted.weights(layer) >= self._preload_floor

    def make_verifier(self, stage: StageRunner, configuration: Configuration) -> Verifier:
        """Return the verifier of an epoch, without sequences.

        stage: The stage of this epoch, which must hold the last layer.
        configuration: The epoch as the master has configured it. If it has no draft head, the verifier keeps
            no features.

        If the layers can be captured, the kernels of the lm_head and of sampling are compiled now, unless
        that was done before, and `capture_tokens` is called. Without a tokenizer, no token is excluded and
        sequences have no soft ends.
        """
        self._read_vocabulary()
        decoder = self._load(stage.layers)
        width = configuration.width_at(stage.layers)
        ring = FeatureRing(width, decoder.dtype, decoder.device) if width else None
        logits = without_tokens(decoder.logits, self._token_bytes.unnamed if self._has_text else ())
        captured_tokens = None
        if decoder.capturable:
            _compile_logits(decoder)
            _await_kernels()
            captured_tokens = capture_tokens(decoder, logits)
        ahead = stage if isinstance(stage, DecoderStage) else None
        sentences = sentence_ends(self._token_bytes) if self._has_text else None
        if self._has_text:
            # Only the last stage needs the tables of grammars. They take seconds of processor time, which
            # would slow down loading, and falsify the measured time of a layer, if they were begun before.
            prebuild(self._token_bytes, idle_seconds)
        return Verifier(logits, self._find_grammar, ring, ahead, sentences, captured_tokens)

    def _read_vocabulary(self) -> None:
        """Read the vocabulary now, so that the first request, or the forming of an epoch, does not wait for
        that. Nothing happens if the model has no tokenizer.
        """
        if self._has_text:
            began = time.monotonic()
            sentence_ends(self._token_bytes)
            add_phase("read vocabulary", time.monotonic() - began)

    @property
    def _has_text(self) -> bool:
        """True if the model has a tokenizer."""
        return (self._options.base / "tokenizer.json").exists()

    def _find_grammar(self, opening: Opening) -> Future[Grammar] | None:
        """Return a future of the grammar that a request asks for. None if it asks for none.

        opening: The opening of the sequence, with its plan or format.
        """
        held = opening.plan or opening.form
        return grammar_of(self._token_bytes, opening) if held else None

    @cached_property
    def _token_bytes(self) -> Vocabulary:
        """The model's vocabulary, read once."""
        return vocabulary_of(self._options.base, self._config.vocab)

    def _move_to(self, gpu: str | None) -> None:
        """Use a GPU from now on. What is loaded on another device is dropped.

        gpu: Id of the GPU. None, or an unknown id: the device stays.

        Nothing happens if the GPU is the present device.
        """
        device = self._gpus.get(gpu or "", self._device)
        if device != self._device:
            self._decoder = None
            self._device = device
            self._compiled = None
            self._parts = LoadedParts()
            use_device(device)

    def _free(self) -> int | None:
        """Return the free bytes of the device; with tensor parallelism, of the device that has the least.
        None: unknown.

        Devices whose free bytes are unknown are ignored unless all are.
        """
        devices = devices_of(self._device, self._options.tensor_parallel) or (self._device,)
        found = [self._free_memory(str(device)) for device in devices]
        return min((one for one in found if one is not None), default=None)

    def _memory(self) -> int | None:
        """Return the bytes that there would be for weights and pages if nothing were loaded yet, at least 0.
        None: unknown.

        The bytes of CUDA graphs for the fixed range, or for all layers, are subtracted.
        """
        free = self._free()
        loaded = self._loaded_bytes(range(self._config.layers)) + self._held_pages
        if free is None:
            return None
        return max(free + loaded - self._graph_bytes(self._layers, room=free + loaded), 0)

    @property
    def _held_pages(self) -> int:
        """Bytes of the GPU that the KV pages of the newest epoch take, as long as they are kept; they are
        freed before those of the next epoch are allocated. 0 on a CPU, whose pages take memory once they are
        used.
        """
        return self._stage_pages if self._device.startswith("cuda") and self._stage() else 0

    def _loaded_bytes(self, layers: Iterable[int]) -> int:
        """Return the bytes of the weights of loaded layers.

        layers: Numbers of the layers to count. Layers that are not loaded count 0.
        """
        counted = self._counted
        loaded_layers = [one for one in layers if one in self._parts.blocks]
        return sum(counted.weights(Range(one, one + 1)) for one in loaded_layers)

    def _graph_bytes(self, layers: Range | None, width: int = 0, room: int | None = None) -> int:
        """Return the bytes of CUDA graphs; see `LayerMemory.graphs`.

        layers: Layer range. None: not known yet.
        width: Number of elements of a fused feature. 0: none.
        room: Free bytes. None: unknown.
        """
        return self._counted.graphs(runs_kernels(torch.device(self._device)), width, layers, room)

    @property
    def _counted(self) -> LayerMemory:
        """The bytes that layers, pages and graphs take, counted for the present device and options."""
        return LayerMemory(self._options, self._config, self._files())

    def _files(self) -> Weights:
        """Return the weight files, to count what is in them. Nothing is fetched for that, unless one file
        holds all weights.

        If files have still to be fetched, the result knows the names and shapes only.
        """
        if self._absent is None:
            bin_too = self._options.model_format == "bin"
            files = open_weights(self._options.base, bin_too, self._options.stored_form)
            if files.complete:
                return files
            self._absent = AbsentWeights(files.names(), self._config)
        return self._absent

    def _check_fit(self, layers: Range, pages: int, graphs: int, held: int = 0) -> None:
        """Check, before anything is loaded, that there is room for a layer range. Loaded layers take no more
        memory. Layers outside the range are dropped.

        layers: The layer range.
        pages: Bytes of KV pages and what is kept for the drafter.
        graphs: Bytes of CUDA graphs.
        held: Bytes that are freed before these are allocated.

        Raises ModelError if there is too little memory.

        If the free memory is unknown, the check passes.
        """
        if self._decoder is None or self._decoder.layers != layers:
            self._decoder = None
            # Free the other layers before the new ones are loaded.
            self._parts.drop_all_but(layers, self._config)
        loaded = self._loaded_bytes(range(layers.first, layers.last))
        # Tied embeddings are one table, but are counted with both ends of the model.
        weights = max(self._counted.weights(layers) - loaded, 0)
        need = Need(weights, pages, graphs)
        free = self._free()
        check_fit(f"layers {layers}", need, self._device, None if free is None else free + held)

    def _load(self, layers: Range) -> Decoder:
        """Return the decoder of a layer range. Layers that are missing are loaded, others are dropped.

        layers: The layer range.

        If the range is the one that is loaded, its decoder is returned as it is. Otherwise `loaded` starts
        from 0, and each loaded layer is reported.
        """
        if self._decoder is None or self._decoder.layers != layers:
            # As in `_check_fit`, free what is not needed before loading.
            self._decoder = None
            self._parts.drop_all_but(layers, self._config)
            self.loaded = 0
            with timed_phase("loaded layers", layers=str(layers)):
                self._decoder = self._load_decoder(layers, self._add_layer)
            self._report_fetched(layers)
            self._preload_floor = None
            # Reading the vocabulary and the layers leaves much free memory in the heap, which would add to
            # the peak: 130 MB with a vocabulary of 150 thousand tokens.
            return_freed_memory()
        return self._decoder

    def _report_fetched(self, layers: Range) -> None:
        """Log how much of borrowed weights was fetched. Nothing is logged for weights that are not borrowed.

        layers: The layer range for which they were fetched.
        """
        if borrowed := borrowed_of(self._options.base):
            borrowed.log_fetched(f"layers {layers}")

    def _load_decoder(self, layers: Range, loaded: Loaded | None = None) -> Decoder:
        """Return the decoder of a layer range, using the layers that are loaded, and loading the others.

        layers: The layer range.
        loaded: Called with the number of loaded layers after each layer. None: nothing is called.
        """
        options = replace(self._options, device=self._device)
        return Decoder.of(options, layers, on_layer_loaded=loaded, parts=self._parts)

    def _add_layer(self, layers: int) -> None:
        """Record that one more layer has been loaded, and report it.

        layers: Number of layers of the range that are loaded by now.

        It is reported by the function `loaded` that the constructor was given, if any.
        """
        self.loaded = layers
        if self._on_layer:
            self._on_layer(layers)


class CompileProgress:
    """Logs how many kernels are compiled, at most once every REPORT_SECONDS, and nothing if that takes
    less."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start now.

        clock: Source of time, in seconds.
        """
        self._clock = clock
        self._reported = clock()

    def __call__(self, num_done: int, num_kernels: int) -> None:
        """Log the number of compiled kernels, if it is time.

        num_done: Number of kernels that are compiled.
        num_kernels: Number of kernels that the steps need.
        """
        now = self._clock()
        if now - self._reported < REPORT_SECONDS:
            return
        self._reported = now
        log.info("compiling kernels", done=num_done, of=num_kernels, once="on each machine")


def _compile_logits(decoder: Decoder) -> None:
    """Begin to compile the kernels of the lm_head, and those that draw tokens, so that no request waits for
    them. See `compile_ahead`.

    decoder: The layer range, which must hold the lm_head.
    """
    from specsot_kernels.gpu.launching import compile_ahead

    hidden = torch.zeros(max(LOGITS_ROWS), decoder.config.hidden, dtype=decoder.dtype, device=decoder.device)

    def run_all() -> None:
        """Compute the logits of every number of rows in LOGITS_ROWS, and draw tokens from the first ones."""
        logits = [decoder.logits(hidden[:rows]) for rows in LOGITS_ROWS]
        compile_draws(logits[0])

    compile_ahead(run_all)


def capture_tokens(decoder: Decoder, logits: Callable[[torch.Tensor], torch.Tensor]) -> CapturedTokens | None:
    """Capture CUDA graphs that choose the argmax of logits, and return them. Return None if no graph can
    capture the logits (`Decoder.captures_logits`).

    decoder: The layer range whose logits are captured.
    logits: Maps hidden states [num_rows, hidden_size] to the logits of `decoder`, [num_rows, vocab], in which
        the tokens that must not be chosen have -inf.
    """
    if not decoder.captures_logits:
        return None

    def choose(hidden: torch.Tensor) -> torch.Tensor:
        """Return the argmax of each row's logits, int32 [num_rows]; -1 where the logits are not finite.

        hidden: Hidden states after the last layer, [num_rows, hidden_size].
        """
        return choose_on_device(logits(hidden), ())

    with timed_phase("captured graphs", what="tokens"):
        return CapturedTokens(choose, decoder.config.hidden, decoder.dtype, decoder.device, GraphCapture())


def _await_kernels() -> None:
    """Wait until all kernels are compiled that this thread has begun to compile, and log their number, and
    whether compiler processes or only threads have compiled them. Nothing is logged if there are none.
    """
    from specsot_kernels.gpu.launching import await_compiled
    from specsot_kernels.gpu_compilers import running

    began = time.monotonic()
    by = "threads" if running() is None else "processes"
    if kernels := await_compiled(CompileProgress()):
        seconds = time.monotonic() - began
        add_phase("compiled kernels", seconds)
        log.info("compiled kernels", kernels=kernels, by=by, seconds=round(seconds, 1))
