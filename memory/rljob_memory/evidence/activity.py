"""The activity of a program when it failed, from the names in its stack.

The innermost telling line counts, by families of function names. A function that serves several purposes, such as one
that gathers full parameters, takes the purpose of the nearest caller that has one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rljob_api.memory_failure import Activity


def _in(*functions: str) -> str:
    """Matches a frame of any of these functions, as `file in function`."""
    return rf" in _{{0,2}}(?:{'|'.join(functions)})$"


_WEIGHTS = r"(?:\w+_)?(?:weights?|params?|parameters|state_dict|adapters?|lora|tensors?|buckets?)"
_ENGINES = r"(?:vllm|sglang|engines?|rollout|inference|generator|generation|llm)"

_NAMES: tuple[tuple[Activity, str], ...] = (
    (Activity.WAKE, r"wake_?up|create_and_map|resume_memory_occupation|" + _in("resume", "onload_engine")),
    (Activity.SLEEP, r"\.sleep\(level|release_memory_occupation|" + _in("sleep", "offload_engine")),
    (
        Activity.PINNING,
        r"of pinned memory|pin_memory(?!\w*=(?:False|is_pin))|cudaHost(?:Alloc|Register)|CachingHostAllocator"
        r"|pin_tensor",
    ),
    (
        Activity.OPTIMIZER,
        r"torch/optim/(?!lr_scheduler|swa_utils)|optim\w*\.load_state_dict|_init_group|exp_avg|optimizer\W{1,3}step\b|optimizer_step|_multi_tensor_"
        r"|sharded_optim|bitsandbytes/optim/|initialize_optimizer_states|fp32_(?:groups|partitions|masters?)"
        r"|zero/stage\w+\.py in (?:__init__|step|_optimizer_step|unscale\w+)$|distrib_optimizer\.py|clip_grad"
        r"|(?:optim|adam|adafactor|muon|lion|shampoo|galore)\w*(?:/\w+)?\.py in "
        r"(?:step\w*|update|__init__|_?init\w*_state\w*)$"
        r"|\boptim\.step\("
        r"|"
        + _in(
            r"_?init_optim\w*",
            r"(?:_?re)?(?:on)?_?load_\w*optim\w*",
            r"\w*optim\w*_to_\w+",
            r"_configure_(?:\w+_)?optimizer",
        ),
    ),
    (
        Activity.CHECKPOINT,
        r"torch\.save\(|torch/distributed/checkpoint/(?!state_dict\.py)|torch/serialization\.py in (?:save|_save)"
        r"|"
        + _in(
            r"\w*save_(?:\w+_)?(?:checkpoint|ckpt|pretrained|model|state|weights|adapter|lora|hf\w*|dcp)\w*",
        )
        + r"|save_checkpoint|save_pretrained|save_model",
    ),
    (
        Activity.WEIGHT_SYNC,
        r"sharding_manager|weights_manager|_model_to_vllm|get_per_tensor_param|gather_full|\bupdate_weights?(?:_(?:from|via|by)_\w+)?\b|sync_weights|weight_sync"
        r"|update_weight\w*(?:/\w+)*\.py in |reload_weights|sync_model_weights|weight_transfer|weight_update|"
        + _in(
            r"(?:async_)?(?:update|reload|refit|refresh)_(?:\w+_)?(?:weights?|adapters?|lora|state_dict|bucket)\w*",
            rf"(?:\w+_)?(?:sync|broadcast|transfer|push|publish|send|stream|export|refit)_{_WEIGHTS}(?:_\w+)?",
            rf"(?:\w+_)?(?:sync|broadcast|update|transfer|push|send|refit)_(?:\w+_)?{_ENGINES}(?:_\w+)?",
            rf"\w+_to_{_ENGINES}(?:_\w+)?",
            r"update_named_param\w*",
            r"(?:\w+_)?sync_model(?:_(?:to|from)_\w+)?",
            r"(?:un)?merge_(?:adapter|lora|and_unload)\w*",
        ),
    ),
    (
        Activity.GATHERING,
        r"partition_parameters\.py in (?:_?all_?gather|__enter__)\w*|GatheredParameters|_unshard_params"
        r"|full_tensor|summon_full_params|unshard_param_utils\.py|consolidated_16bit_state_dict|state_dict_utils\.py|checkpoint/state_dict\.py|"
        + _in(r"\w*state_dict(?<!load_state_dict)\w*", "redistribute", r"gather_\w*(?:params?|parameters|weights)"),
    ),
    (
        Activity.MODEL_LOAD,
        r"from_pretrained|_auto_wrap|_sync_(?:params_and_buffers|module_\w+)|fully_shard\(|\bmodel\.(?:to|cuda)\("
        r"|caching_allocator_warmup|t\.to\(device, dtype if|\.weight\.data\.to\(|/model_loader|weight_utils\.py"
        r"|big_modeling\.py|set_module_\w*tensor_to_device|\baccelerator\.prepare\("
        r"|_move_model_to_device|create_weights|process_weights_after_loading|safetensors/torch\.py"
        r"|torch/serialization\.py|_init_param_handle|_configure_distributed_model|param_and_grad_buffer\.py"
        r"|nn/modules/module\.py in (?:to|to_empty|cuda|half|_apply|convert)$"
        r"|bitsandbytes/nn/modules\.py in (?:to|cuda)$|nn/modules/\w+\.py in (?:__init__|reset_parameters)$"
        r"|/(?:models?|layers|modules?|transformer)/\S{1,80}\.py in (?:__init__|<lambda>)$"
        r"| in (?:build_module|reset_parameters)$"
        r"|peft/tuners/\S{1,60} in (?:update_layer|__init__)$"
        r"|(?:modeling|pipeline|model)\w*\.py in (?:to|cuda|half|float)$|nn/parallel/distributed\.py in __init__$"
        r"|_ddp_init_helper|_zero_init_param|_post_init_method|\b(?:\w+_)?load_(?:\w+_)?(?:checkpoint|state_dict)\("
        r"|(?:model|linear|layer|module|weight)\w*\.py in load$| in create_quantized_params?$"
        r"|_flat_param\.py in (?:_init_flat_param\w*|flatten_tensors\w*)$"
        r"|partition_parameters\.py in _?partition(?:_param)?$"
        r"|\bload_(?:pretrained_)?model\(|"
        + _in(
            r"\w*(?:load|resume|restore)_(?:\w+_)?(?:checkpoint|ckpt)\w*",
            r"(?:\w+_)?(?:re|on)?load_(?:\w+_)?(?:model|weights?|params?|module|state_dict)(?:_\w+)?",
            r"(?:\w+_)?(?:get|init|initialize|build|create|setup|prepare|dispatch|materialize|move)_(?:\w+_)?model(?:_\w+)?",
        ),
    ),
    (
        Activity.KV_CACHE,
        r"(?:initialize|allocate|init|create|_allocate)_(?:\w+_)?(?:kv_?)?caches?\b|_kv_cache_tensors|memory_pool\.py"
        r"|cache_engine|" + _in("kv_cache", r"init_memory_pool"),
    ),
    (
        Activity.GRAPH_CAPTURE,
        r"[Cc]apture (?:cuda|CUDA) graph failed|capture_(?:model|graph|one_batch_size|cudagraphs?|cuda_graphs?)"
        r"|cuda_graph_runner|profile_cudagraph",
    ),
    # vLLM's pass that measures what is left for the KV cache. Its functions run again once there is one.
    (Activity.ENGINE_PROFILING, r"profile_run|determine_(?:num_)?available"),
    (Activity.ENGINE_WARM_UP, r"_dummy_run|_dummy_sampler_run|compile_or_warm_up|kernel_warmup"),
    (
        Activity.SAMPLING,
        r"apply_(?:min|top)_|top_?k_?top_?p|apply_(?:all_)?penalties|/sampler\.py|/sample/|sampling_batch_info"
        r"|gather_logprobs|_multinomial|" + _in("sample", "_sample", "random_sample", r"sample_tokens?"),
    ),
    (
        Activity.LOGITS,
        r"log_softmax|cross_entropy|\blogits(?:\[[^\]]{0,40}\])? (?:[-+*/]|/=|\*=) \w"
        r"|logits[\w\[\], :.-]*\.(?:float|to|clone|log_softmax)\(|compute_log_?probs?"
        r"|logprobs?_from_logits|get_\w*per_token_logps|selective_log_softmax|lm_head(?!\.weight)|entropy_from_logits|logsumexp"
        r"|in \w*entropy\w*$|in \w*log_?probs?_(?:from|and)_\w+$|in (?:get|calc\w*|gather)_log_?probs?\w*$"
        r"|vocab_parallel|compute_logits|logits_processor|get_logits|loss/loss_utils\.py|from_parallel_logits"
        r"|float16_to_fp32",
    ),
    (Activity.COLLECTING, r"\bnested_(?:concat|gather)\w*(?:\(|$)|torch_pad_and_concatenate|trainer_pt_utils\.py"),
    (
        Activity.BACKWARD,
        r"\.backward\(|in backward\b|run_backward|utils/checkpoint\.py in (?:unpack_hook|recompute_fn)|"
        + _in(r"\w*post_backward\w*", r"\w*(?:reduce|average)_\w*(?:grads?|gradients?|p_g_buckets?)\w*"),
    ),
    (Activity.ENGINE_STEP, r"execute_model|forward_batch_generation"),
    (Activity.GENERATION, r"generate_sequences|in generate\b|/generation/utils\.py|cache_utils\.py in update$"),
    (
        Activity.FORWARD,
        r"fetch_sub_module|pre_sub_module_forward|torchinductor_\w+/\S+ in call$|_inductor/output_code\.py"
        r"|\bempty_strided_(?:cuda|xpu)\(|"
        + _in(
            r"_?(?:pre|root_pre|post)_(?:forward|unshard)\w*",
            r"(?:train\w*|validat\w+|eval\w*|forward|update|ppo)_(?:step|batch|epoch)",
            "compute_loss",
        ),
    ),
)
_PATTERNS = tuple((activity, re.compile(names)) for activity, names in _NAMES)
_PROSE = tuple(
    (activity, re.compile(words, re.IGNORECASE))
    for activity, words in (
        (
            Activity.WEIGHT_SYNC,
            r"\b(?:updat|sync|broadcast|transfer|refit|receiv)\w{0,10} (?:\w{1,20} ){0,3}"
            r"(?:weights?|param(?:eter)?s?)\b",
        ),
        (Activity.GATHERING, r"\bstate_dict\(?\)? (?:call|entry)\b"),
        (
            Activity.KV_CACHE,
            r"\b(?:allocat|creat|initiali[sz])\w{0,4} (?:\w{1,20} ){0,3}kv[ _-]?cache"
            r"|(?:fail|unable|not be created).{0,60}\bkv[ _-]?cache",
        ),
        (
            Activity.MODEL_LOAD,
            r"\bload(?:ing|ed)? (?:\w{1,20} ){0,3}(?:models?|weights?|checkpoints?)\b"
            r"|\bmodel (?:\w{1,20} ){0,2}alloc\w* fail|alloc_tensor_range|\bShardCannotStart\b|\bmodel failed to load",
        ),
        (Activity.OPTIMIZER, r"\boptimi[sz]er(?:'s)? (?:states?|steps?)\b|\boptimizer\.step\b"),
        (Activity.BACKWARD, r"\bbackward(?: pass| step|\(\)|\b)"),
        (
            Activity.CHECKPOINT,
            r"\bsav(?:e|ing) (?:\w{1,20} ){0,3}(?:checkpoints?|ckpt|models?|weights)\b"
            r"|\b(?:checkpoint|ckpt|model) saving\b",
        ),
        (Activity.GRAPH_CAPTURE, r"\bcaptur\w{0,4} (?:\w{1,20} ){0,3}graphs?\b"),
        (Activity.ENGINE_WARM_UP, r"\binitiali[sz]\w{0,4} (?:the |vLLM )?(?:executor|engine)\b"),
        (
            Activity.FORWARD,
            r"\b(?:during|on|in|at) (?:[\w-]{1,20} ){0,3}prefill\b|\bprefill failed\b|failed to allocate compute"
            r"|failed to (?:create|initialize) (?:the )?context|\bAllocation type: HLO temp\b|\bexecute op failed\b"
            r"|\b(?:error|fail\w*) (?:during|in) (?:the )?forward (?:propagation|pass)\b",
        ),
    )
)
"""Activities in the words of a message, and of the report that follows it."""
_CIRCUMSTANCE = re.compile(
    r"(?:out of memory|OOMs?)(?: errors?)?,? (?:when|while|during|on|in|at|after|before|with)\b(.{1,100})",
    re.IGNORECASE,
)
_MOST_CHARACTERS = 1_000
"""Maximum length of the text before a shortage."""
_FORWARD = re.compile(
    r"in \w*forward\b|_call_impl|/(?:\w{1,20}_)?moe/\S{1,60}\.py in "
    r"|torch/nn/functional\.py in |attention\w*\.py in |in (?:\w*attention\w*|unshard)$"
    # code of a model, in a post without frames
    r"|attn_weights|attn_wrappers|\w*sdpa\w*\(|scaled_dot_product|hidden_states|query_states|\bF\.\w+\(|nn\.functional\.\w+\(|torch\.(?:matmul|bmm|baddbmm)\("
)
_OF_THE_START = frozenset({Activity.ENGINE_PROFILING, Activity.ENGINE_WARM_UP, Activity.GRAPH_CAPTURE})
_SERVES: dict[Activity, frozenset[Activity]] = {
    Activity.GATHERING: frozenset(
        {Activity.WEIGHT_SYNC, Activity.CHECKPOINT, Activity.OPTIMIZER, Activity.FORWARD, Activity.BACKWARD}
    ),
    Activity.MODEL_LOAD: frozenset({Activity.WEIGHT_SYNC, Activity.CHECKPOINT, Activity.WAKE, Activity.OPTIMIZER}),
    Activity.LOGITS: _OF_THE_START,
    Activity.SAMPLING: _OF_THE_START,
    Activity.ENGINE_STEP: _OF_THE_START,
    Activity.ENGINE_WARM_UP: frozenset({Activity.ENGINE_PROFILING}),
}
"""Activities on behalf of others: the nearest caller among these is the purpose."""


def activity_of(stack: Sequence[str]) -> Activity | None:
    """The activity of a stack, given as lines with the outermost frame first; None if no line names one.

    The innermost line counts: Lightning runs the whole training step inside `optimizer.step(closure)`. A plain
    `forward` counts only if nothing else does, since most stacks contain it.
    """
    found: Activity | None = None
    for line in reversed(stack):
        activity = _activity_of_line(line)
        if activity is None:
            continue
        if found is None or activity in _SERVES[found]:
            found = activity
            if found not in _SERVES:
                return found
    if found is not None:
        return found
    return Activity.FORWARD if any(_FORWARD.search(line) for line in stack) else None


def activity_of_text(text: str) -> Activity | None:
    """The activity that a message names before the shortage, or a title after it: `Capture cuda graph failed: CUDA out
    of memory`, `OOM when saving checkpoints`."""
    before = text.partition("out of memory")[0][-_MOST_CHARACTERS:]
    after = _CIRCUMSTANCE.search(text)
    named = f"{before} {after[1]}" if after else before
    in_prose = (activity for activity, pattern in _PROSE if pattern.search(named))
    return next(in_prose, None) or _activity_of_line(named)


def activity_of_report(text: str) -> Activity | None:
    """The activity in a report that something could not be made, which follows an error without a stack."""
    return next((activity for activity, pattern in _PROSE if pattern.search(text)), None)


def _activity_of_line(line: str) -> Activity | None:
    return next((activity for activity, pattern in _PATTERNS if pattern.search(line)), None)


# Frames of a stack in a log, in the forms of Python, IPython, Colab and rich, and lines of code without a frame.

_FRAME = re.compile(
    r"(?:File \\?[\"']|^\W{0,8}(?:File )?\[?)(?P<file>[~/<\w\\][^\"'\n\]]{0,400}?)"
    r"(?:\\?[\"'], line \d+,|:\d+,?|\]\([^)\s]{1,200}\)|(?<=\.py)) in (?P<name>[\w<>.]{1,100})"
)
_CODE = re.compile(
    r"^\W{0,12}(?:return |raise |for |if |with )?[\w.\[\], *'\"]{1,80}(?: ?[-+*/]?= ?\S|\w\()|^\W{0,8}(?:→|->) \w"
)
_NUMBERED = re.compile(r"^[│|]?\s*(?:❱|-+>)?\s*\d{1,6}[\s│]+(?=[\w#])")
"""The number before a line of code, in the boxes of rich and in IPython's tracebacks."""
_LOGGED = re.compile(r"\d\d:\d\d:\d\d|\b(?:INFO|WARNING|ERROR|DEBUG|Error|Warning)\b|^\s*(?:\$|>|export) ")
_LOADING = re.compile(
    r"[Ll]oading (?:\w{1,40} ){0,3}shards:.{0,60}?\b\d{1,2}%|Starting to load model|Load weight begin"
)
"""Progress of the loading of weights that is not complete: transformers, vLLM, SGLang."""
LOADED = re.compile(r"shards:.{0,60}?\b100%|[Ll]oading (?:model )?weights took|Model loading took|Load weight end")
"""Its end."""
LOADING = "log in load_model"
"""The frame in whose place a line of that progress stands."""
_CALL = re.compile(
    r"\bray::(?:\w{1,100}\.)?(?P<name>\w{1,100})\(\)"
    r"|(?:[Ee]rror|[Ee]xception|[Ff]ail).{0,100}\b(?:running|executing|calling) "
    r"(?:[\w.']{1,80} ){0,2}(?:function|method) [`'\"]?(?P<name2>\w{3,100})"
    r"|[Ee]rror executing (?P<name3>\w{3,100}) with"
)
"""Ray's name of the task, above the traceback that it returns; the method that an engine reports as failing."""


def frames_of(text: str) -> list[str]:
    """`file in function` of each frame in the line, with the slashes of Unix."""
    if " in " not in text:
        return []
    return [
        f"{match['file']} in {match['name'].rpartition('.')[2]}".replace("\\", "/") for match in _FRAME.finditer(text)
    ]


def call_of(text: str) -> str | None:
    """The function that the line reports as running, in the form of a frame; None if it names none."""
    if "oad" in text and _LOADING.search(text):
        return LOADING
    if "ray::" not in text and "ing " not in text:
        return None
    match = _CALL.search(text)
    return f"log in {match['name'] or match['name2'] or match['name3']}" if match else None


def code_of(lines: Sequence[str]) -> list[str]:
    """The lines that can be code or the name of a function, as posts have them without a frame."""
    plain = [_NUMBERED.sub("", line).strip() for line in lines]
    return [line for line in plain if _CODE.search(line) and not _LOGGED.search(line)]
