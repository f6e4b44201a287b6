# SPDX-License-Identifier: Apache-2.0
"""vLLM's real Scheduler and OffloadingConnector, all ranks in one process, and a fake model.

This module does the work of EngineCore, the executor and the model runner in the same way; where releases
differ, it tries both ways. Everything is real except the model (oracle.runner).
"""

import copy
import itertools
import json
import os
import pickle
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from oracle.inputs import Inputs
from oracle.runner import FakeRunner, TokenPart

try:
    from vllm.v1.core import kv_cache_planning as planning  # 0.33
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

STATE_MODE = "align"  # one state per step; prefill steps end at block boundaries
STATE = 0  # the window of a group whose pages hold one state instead of tokens


@dataclass(frozen=True)
class Setup:
    """The configuration of one kind of engine."""

    extra: dict[str, Any] = field(default_factory=dict)  # kv_connector_extra_config besides the spec
    layers: int = 2
    window: int | None = None  # every second layer looks back this many tokens; STATE: Mamba-like
    replicated: bool = False  # one latent vector for all ranks (MLA)
    # KV heads, split between the ranks, each contiguous in a page; None: pages of tokens
    heads: int | None = None
    head_size: int = 2
    backend: str | None = None  # name of the attention backend, for layouts of keys and values
    fp8: bool = False  # caches in fp8_e4m3
    block_size: int = 16
    kv_dtype: str = "float32"
    hash_algorithm: str = "sha256"
    layout: str = "LBHNC"
    world_size: int = 1
    pipelined: bool = False  # each rank has its own layers instead of a share of every layer
    tensor_ranks: int | None = None  # ranks of a pipeline stage; None: one if pipelined, otherwise all
    # emulated hosts, each with as many ranks: a region of its own, connected over the loopback interface
    hosts: int = 1
    num_blocks: int = 40
    max_model_len: int = 320
    max_seqs: int = 6
    max_batched_tokens: int = 96
    async_scheduling: bool = False
    events: bool = False
    device: str = "cpu"  # device of the caches
    drafts: int = 0  # draft tokens per step of the last layer, a drafter's (EAGLE, MTP)
    shared_layers: int = 0  # additional last layers without a KV cache: they read another layer's
    encoder_tokens: int = 0  # image tokens that the encoder cache holds and a step may encode
    modules: bool = False  # each draft has its own module: windows keep more tokens (multi-layer MTP)
    hybrid_manager: bool = True  # False: vLLM keeps all blocks of windowed layers
    match_unit: int | None = None  # --prefix-match-unit: states are also kept at parts of a block
    # windows are kept and stored once per this many tokens; 0: the last one of a prompt
    retention: int | None = 0
    pcp: int = 1  # --prefill-context-parallel-size: the ranks are as many times the tensor-parallel ones
    dcp: int = 1  # --decode-context-parallel-size: ranks of a group that share the tokens of a block
    interleave: int = 1  # --cp-kv-cache-interleave-size: consecutive tokens on one rank of the group
    mirrored: bool = False  # the model works on a copy of the caches, as for GPU caches
    wrap_worker: Callable[[Any, Any], Any] | None = None  # (worker, region) -> worker: planted faults
    wrap_manager: Callable[[Any], Any] | None = None
    make_runner: Callable[..., FakeRunner] = FakeRunner

    @property
    def ranks_of_stage(self) -> int:
        return self.tensor_ranks or (1 if self.pipelined else self.world_size)


def _vllm_config(setup: Setup, model_dir: str, engine_id: str) -> VllmConfig:
    model = ModelConfig(
        model=model_dir,
        skip_tokenizer_init=True,
        dtype=setup.kv_dtype,
        max_model_len=setup.max_model_len,
        seed=0,
    )
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id=engine_id,
        kv_connector_extra_config={
            "spec_name": "KVOffloadSpec",
            "spec_module_path": "kv_offload.specs",
            **setup.extra,
        },
    )
    cache = CacheConfig(
        block_size=setup.block_size,
        cache_dtype="fp8" if setup.fp8 else "auto",
        enable_prefix_caching=True,
    )
    cache.prefix_caching_hash_algo = setup.hash_algorithm
    cache.prefix_cache_retention_interval = setup.retention
    if setup.window == STATE:
        cache.mamba_cache_mode = STATE_MODE
    cache.prefix_match_unit = setup.match_unit
    cache.num_gpu_blocks_override = setup.num_blocks
    cache.kv_cache_layout = setup.layout
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=setup.max_seqs,
            max_num_batched_tokens=setup.max_batched_tokens,
            max_model_len=setup.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=setup.async_scheduling,
            disable_hybrid_kv_cache_manager=not setup.hybrid_manager,
        ),
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if setup.events
        else None,
        parallel_config=ParallelConfig(
            tensor_parallel_size=setup.ranks_of_stage // setup.pcp,
            pipeline_parallel_size=setup.world_size // setup.ranks_of_stage,
            prefill_context_parallel_size=setup.pcp,
            decode_context_parallel_size=setup.dcp,
            cp_kv_cache_interleave_size=setup.interleave,
            distributed_executor_backend="mp",
        ),
        device_config=DeviceConfig(setup.device),
    )
    if setup.drafts:
        config.speculative_config = _drafting(config, setup.drafts)
    if setup.modules:
        object.__setattr__(config.speculative_config, "use_multi_module_mtp", lambda: True)
        assert config.num_prefill_lookahead_tokens == setup.drafts > 1
    return config


def _drafting(config: VllmConfig, tokens: int) -> SpeculativeConfig:
    """Returns the configuration of an MTP drafter, without its weights."""
    drafting = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=tokens,
        prompt_lookup_max=2,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    drafting.method = "mtp"
    return drafting


class NoStructuredOutput:
    """The scheduler's grammar manager, for requests without a grammar. (A mock would keep each call.)"""

    def accept_tokens(self, request: Request, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        return tokens


class SpecOnly:
    """A layer that only reports its cache spec, its cache and the name of its attention backend."""

    def __init__(self, spec: Any, kv_cache: torch.Tensor | None = None, backend: str | None = None) -> None:
        self._spec = spec
        self.kv_cache = kv_cache
        if backend is not None:
            self.kv_cache_dtype = "fp8_e4m3" if spec.dtype == torch.uint8 else "auto"
            self.attn_backend = SimpleNamespace(get_name=lambda: backend, customize_spec=lambda found: found)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self._spec


def make_model_dir(**changes: Any) -> str:
    """Makes a model directory with a config and a file that represents its weights."""
    path = tempfile.mkdtemp(prefix="oracle-model-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    } | changes
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    with open(os.path.join(path, "model.safetensors"), "wb") as file:
        file.write((2).to_bytes(8, "little") + b"{}")
    return path


def _layer_specs(setup: Setup) -> dict[str, Any]:
    heads = 2 if setup.heads is None else max(1, setup.heads // setup.ranks_of_stage)
    common = {
        "block_size": setup.block_size,
        "num_kv_heads": heads,
        "head_size": setup.head_size,
        "dtype": torch.uint8 if setup.fp8 else getattr(torch, setup.kv_dtype),
    }
    if setup.fp8:
        common["kv_quant_mode"] = get_kv_quant_mode("fp8")

    def spec_of(layer: int) -> Any:
        if setup.replicated:
            return MLAAttentionSpec(**{**common, "num_kv_heads": 1, "head_size": 8, "max_tp_shards": 1})
        if setup.window is None or layer % 2 == 0:
            return FullAttentionSpec(**common)
        if setup.window != STATE:
            return SlidingWindowSpec(**common, sliding_window=setup.window)
        page = FullAttentionSpec(**common).page_size_bytes
        return MambaSpec(
            block_size=setup.block_size,
            shapes=((page // 4 - 8,),),  # the page is padded
            dtypes=(torch.float32,),
            page_size_padded=page,
            mamba_cache_mode=STATE_MODE,
        )

    specs = {_layer_name(layer): spec_of(layer) for layer in range(setup.layers)}
    last = _layer_name(setup.layers - 1)
    # 0.33; earlier releases take the last layer as the MTP layer
    if setup.drafts and hasattr(specs[last], "is_draft"):
        specs[last] = replace(specs[last], is_draft=True)
    return specs


def _layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def _shared_layers(setup: Setup) -> dict[str, str]:
    """Maps a layer to the layer whose KV cache it reads: the last of its kind that has a cache (Gemma 3n)."""
    kinds = 1 if setup.window is None else 2
    return {
        _layer_name(layer): _layer_name(setup.layers - kinds + (layer - setup.layers) % kinds)
        for layer in range(setup.layers, setup.layers + setup.shared_layers)
    }


def _specs_by_rank(setup: Setup) -> list[dict[str, Any]]:
    specs = _layer_specs(setup)
    stages = setup.world_size // setup.ranks_of_stage
    ends = [setup.layers * stage // stages for stage in range(stages + 1)]
    return [
        dict(list(specs.items())[first:end])
        for first, end in itertools.pairwise(ends)
        for _ in range(setup.ranks_of_stage)
    ]


def _kv_cache_configs(config: VllmConfig, per_rank: list[dict[str, Any]]) -> list[Any]:
    memory = [1 << 30] * len(per_rank)
    if hasattr(planning, "get_global_kv_cache_groups"):
        groups = planning.get_global_kv_cache_groups(config, per_rank)
        return list(planning.get_kv_cache_configs(config, per_rank, memory, groups))
    return list(planning.get_kv_cache_configs(config, per_rank, memory))


def _noise(kv_cache_config: Any, rank: int) -> torch.Tensor:
    """Returns the memory of all caches of a rank (int8), filled with noise."""
    size = max(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-128, 127, (size,), dtype=torch.int8, generator=generator)


def _views(kv_cache_config: Any, specs: dict[str, Any], backing: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns layer name -> int8 view (num_blocks, page) of ``backing``, placed as the KVCacheConfig says."""
    caches = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            caches[name] = torch.as_strided(
                backing,
                (kv_cache_config.num_blocks, specs[name].page_size_bytes),
                (tensor.block_stride, 1),
                tensor.offset + index * tensor.layer_stride,
            )
    return caches


def _as_seen(caches: dict[str, torch.Tensor], specs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the same memory in a backend's shape: (num_blocks, heads, block_size, K and V)."""
    seen = {}
    for name, view in caches.items():
        spec = specs[name]
        if isinstance(spec, MambaSpec):
            seen[name] = view
            continue
        elements = view.view(spec.dtype)
        shape = (view.shape[0], spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        strides = (elements.stride(0), shape[2] * shape[3], shape[3], 1)
        seen[name] = elements.as_strided(shape, strides)
    return seen


def _window_of(spec: Any) -> int | None:
    if isinstance(spec, MambaSpec):
        return STATE
    window: int | None = getattr(spec, "sliding_window", None)
    return window


class Mirror:
    """A copy in host memory of caches on a device, for a model that computes on the host.

    Only the bytes that the model wrote are copied back: loads may arrive concurrently.
    """

    def __init__(self, backing: torch.Tensor) -> None:
        self.backing = backing
        self.host = backing.cpu().clone()
        self.pulled = self.host.clone()

    @contextmanager
    def brought_up_to_date(self) -> Iterator[None]:
        """Copies the caches to the host; on exit copies changed bytes back, on the current stream."""
        self.host.copy_(self.backing)
        self.pulled.copy_(self.host)
        yield
        changed = (self.host != self.pulled).nonzero().flatten()
        self.backing[changed.to(self.backing.device)] = self.host[changed].to(self.backing.device)


class Engine:
    """One engine from start to shutdown."""

    def __init__(self, setup: Setup, engine_id: str, model_dir: str | None = None) -> None:
        self.setup = setup
        # vLLM requires fewer KV heads than ranks for decode context parallelism
        self.model_dir = model_dir or make_model_dir(**({"num_key_value_heads": 1} if setup.dcp > 1 else {}))
        init_none_hash(get_hash_fn_by_name(setup.hash_algorithm))
        self.config = _vllm_config(setup, self.model_dir, engine_id)
        self.config.scheduler_config.async_scheduling = setup.async_scheduling  # the CPU platform disables it
        self.config.parallel_config.nnodes = setup.hosts
        specs = _specs_by_rank(setup)
        with set_current_vllm_config(self.config):
            configs = _kv_cache_configs(self.config, specs)
        for kv_cache_config in configs:
            kv_cache_config.kv_cache_layout = setup.layout
        scheduler_config = generate_scheduler_kv_cache_config(configs)
        self.draft_groups = [group.is_eagle_group for group in scheduler_config.kv_cache_groups]
        self.config.cache_config.num_gpu_blocks = scheduler_config.num_blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(scheduler_config, self.config)
        for kv_cache_config in (*configs, scheduler_config):
            if hasattr(kv_cache_config, "hash_block_size"):
                kv_cache_config.hash_block_size = hash_block_size
                kv_cache_config.cache_hit_alignment_tokens = (
                    kv_cache_utils.resolve_cache_hit_alignment_tokens(
                        scheduler_config, self.config, block_size, hash_block_size
                    )
                )
        self.windows = [_window_of(group.kv_cache_spec) for group in scheduler_config.kv_cache_groups]
        self.mirrors: list[Mirror | None] = [None] * setup.world_size
        started = {}
        each = setup.world_size // setup.hosts
        for first in reversed(range(0, setup.world_size, each)):  # rank 0 waits for the other hosts
            for rank in range(first, first + each):
                started[rank] = self._start_rank(rank, configs[rank], specs[rank])
        self.ranks = [started[rank] for rank in range(setup.world_size)]
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=scheduler_config,
            structured_output_manager=NoStructuredOutput(),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        if setup.encoder_tokens:  # vLLM recognises image models by the model class, which is missing here
            self.scheduler.max_num_encoder_input_tokens = setup.encoder_tokens
            self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=setup.encoder_tokens)
        connector_scheduler = self.scheduler.connector.connector_scheduler
        self.manager = connector_scheduler.manager
        if setup.wrap_manager is not None:
            connector_scheduler.manager = setup.wrap_manager(self.manager)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, setup.world_size)
        self.hasher = get_request_block_hasher(hash_block_size, get_hash_fn_by_name(setup.hash_algorithm))
        self.async_scheduling = setup.async_scheduling
        self.queue: deque[tuple[Any, list[Any]]] = deque()
        self.stats: list[Any] = []
        self.sync_loads = 0  # loads that end within the step that starts them (sync_load_budget_bytes)

    def _start_rank(self, rank: int, kv_cache_config: Any, specs: dict[str, Any]) -> tuple[Any, Any, Any]:
        config = copy.deepcopy(self.config)
        config.parallel_config.rank = rank
        config.parallel_config.node_rank = rank * self.setup.hosts // self.setup.world_size
        backing = _noise(kv_cache_config, rank).to(self.setup.device)
        mirror = Mirror(backing) if self.setup.mirrored or self.setup.device != "cpu" else None
        caches = _views(kv_cache_config, specs, backing)
        seen = caches if mirror is None else _views(kv_cache_config, specs, mirror.host)
        registered = caches if self.setup.heads is None else _as_seen(caches, specs)
        config.compilation_config.static_forward_context = {
            name: SpecOnly(
                spec, registered[name], None if isinstance(spec, MambaSpec) else self.setup.backend
            )
            for name, spec in specs.items()
        }
        # as in vLLM's runner: after its KVCacheConfig
        for name, target in _shared_layers(self.setup).items():
            registered[name] = registered[target]
            config.compilation_config.static_forward_context[name] = SpecOnly(specs[target], registered[name])
        with set_current_vllm_config(config):
            connector = OffloadingConnector(config, KVConnectorRole.WORKER, kv_cache_config)
            connector.register_kv_caches(registered)
        if self.setup.wrap_worker is not None:
            side = connector.connector_worker
            side.worker = self.setup.wrap_worker(side.worker, rank)
        views = [
            [seen[name].numpy() for name in group.layer_names] for group in kv_cache_config.kv_cache_groups
        ]
        drafter = _layer_name(self.setup.layers - 1) if self.setup.drafts else None
        draft_layers = {
            (number, group.layer_names.index(drafter))
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            if drafter in group.layer_names
        }
        # The ranks of a stage have the same bytes if the cache is replicated.
        alike = self.config.parallel_config.tensor_parallel_size if self.setup.replicated else 1
        known_as = rank // alike
        self.mirrors[rank] = mirror
        numbers = [
            [int(name.split(".")[2]) for name in group.layer_names]
            for group in kv_cache_config.kv_cache_groups
        ]
        runner = self.setup.make_runner(
            views,
            self.windows,
            self.setup.block_size,
            known_as,
            draft_layers,
            self._heads_of(rank),
            [self._part_of(rank, group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups],
            numbers,
        )
        return config, connector, runner

    def _part_of(self, rank: int, spec: Any) -> TokenPart:
        """Returns the tokens that a rank holds. The ranks of a group for decode context parallelism are
        consecutive; with prefill context parallelism, the ranks of its groups come first.
        """
        dcp = self.setup.dcp if spec.dcp_sharded else 1
        context, tensor = divmod(rank, self.setup.world_size // self.setup.pcp)
        return TokenPart(dcp, (tensor * self.setup.pcp + context) % dcp, self.setup.interleave)

    def _heads_of(self, rank: int) -> range | None:
        """Returns the KV heads of a rank. If there are fewer heads than ranks, several ranks share a head."""
        total, ranks = self.setup.heads, self.setup.ranks_of_stage
        if total is None:
            return None
        rank %= ranks
        return range(rank * total // ranks, rank * total // ranks + max(1, total // ranks))

    # ---- requests

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        cache_salt: str | None = None,
        params: dict[str, Any] | None = None,
        lora: str | None = None,
        resumable: bool = False,
        after: Sequence[int] = (),
        inputs: Inputs | None = None,
    ) -> Request:
        """Adds a request as the front end sends it. ``resumable``: a part of a session that follows the
        tokens ``after``. ``inputs``: the parts of the prompt that are not tokens.
        """
        inputs = inputs or Inputs()
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            request_id=request_id,
            prompt_token_ids=inputs.token_ids(prompt),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=cache_salt,
            lora_request=LoRARequest(lora, 1, "/nowhere") if lora else None,
            block_hasher=self.hasher,
            resumable=resumable,
            **inputs.request_fields(),
        )
        for _, _, runner in self.ranks:
            salt = f"{lora}/{cache_salt}" if lora else cache_salt
            runner.expect(request_id, [*after, *prompt], max_tokens, salt, inputs.contents())
        self.scheduler.add_request(request)
        return request

    def go_on(self, session: Request, part: list[int], max_tokens: int) -> None:
        """Adds the next part of a waiting session. vLLM keeps the computed part of the previous answer."""
        kept = list(session.all_token_ids[: session.num_computed_tokens])
        self.add(session.request_id, part, max_tokens, resumable=True, after=kept)
        assert list(session.all_token_ids) == [*kept, *part]

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self, running: bool) -> bool:
        """Resets prefix cache and connector; ``running`` preempts running requests first. Returns False when
        vLLM refuses, because a load or a batch in flight still holds blocks. Also returns False where vLLM
        would end with an assertion: the jobs that a reset flushed must be sent with a step before the next
        reset (0.31 to 0.33).
        """
        if self.scheduler.connector.connector_scheduler._current_batch_jobs_to_flush:
            return False
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            return False
        return True

    @property
    def busy(self) -> bool:
        return bool(self.queue) or self.scheduler.has_requests()

    # ---- steps

    def step(self) -> None:
        """Runs one step of the engine core, with a batch in flight where scheduling is asynchronous."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.queue.append((output, self._execute(output)))
            if self.async_scheduling and len(self.queue) < 2 and self.scheduler.has_requests():
                return
        if self.queue:
            output, ranks = self.queue.popleft()
            model_output = self.aggregator.aggregate(ranks)
            for results in self.scheduler.update_from_output(output, model_output).values():
                self._collect(results)
            self._propose(model_output.req_ids)

    def _propose(self, request_ids: list[str]) -> None:
        _, _, runner = self.ranks[0]
        if self.setup.drafts and not self.async_scheduling:
            drafts = [runner.propose(name, self.setup.drafts) for name in request_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(request_ids), drafts))

    def _collect(self, results: Any) -> None:
        if results.scheduler_stats is not None and results.scheduler_stats.kv_connector_stats:
            self.stats.append(results.scheduler_stats.kv_connector_stats)

    def _execute(self, output: Any) -> list[Any]:
        loads = output.kv_connector_metadata.load_jobs.values()
        self.sync_loads += sum(getattr(job, "sync", False) for job in loads)
        metadata = pickle.dumps(output.kv_connector_metadata)
        return [self._execute_rank(rank, output, metadata) for rank in range(len(self.ranks))]

    def _execute_rank(self, rank: int, output: Any, metadata: bytes) -> Any:
        config, connector, runner = self.ranks[rank]
        output = copy.copy(output)
        output.kv_connector_metadata = pickle.loads(metadata)
        kv_transfer_state._KV_CONNECTOR_AGENT = connector
        connector.handle_preemptions(output.kv_connector_metadata)
        mirror = self.mirrors[rank]
        mirrored = nullcontext if mirror is None else mirror.brought_up_to_date
        with mirrored():
            runner.update(output)  # copies blocks
        with (
            set_current_vllm_config(config),
            set_forward_context(None, config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as kv_output,
            mirrored(),
        ):
            samples = runner.forward(output)
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        ids = list(samples)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[samples[name] for name in ids],
            kv_connector_output=kv_output,
        )

    def drain(self, seconds: float = 300) -> None:
        """Steps until no work is left."""
        deadline = time.monotonic() + seconds
        while self.busy or self.scheduler.connector.connector_scheduler.has_pending_push_work():
            assert time.monotonic() < deadline, f"the engine still has work after {seconds:g} s"
            self.step_idle()
        self.step_idle()

    def step_idle(self) -> None:
        """Steps as the engine core's busy loop does: also when only the connector has work."""
        if self.busy:
            self.step()
            return
        output = self.scheduler.schedule()
        model_output = self.aggregator.aggregate(self._execute(output))
        self.scheduler.update_from_output(output, model_output)

    def shutdown(self) -> None:
        for _, connector, _ in self.ranks:
            connector.shutdown()
        self.scheduler.connector.shutdown()
