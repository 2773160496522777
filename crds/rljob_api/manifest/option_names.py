"""Options of TRL, verl, OpenRLHF, SkyRL, prime-rl, peft, vLLM and Kubernetes, and the fields of RLJob that correspond
to them."""

from __future__ import annotations

import re

from rljob_api.tracking import TRACKERS

_NO_PENALTIES = "not supported: the policy would have other probabilities than the engine"
_TRACKING = "spec.tracking (a list, as [{name: wandb}])"
_NO_CRITIC = "not supported: there is no critic and no discount"
_NO_EPOCHS = "epochs are not supported: write spec.algorithm.steps (prompts x epochs / promptsPerStep)"
_NOT_NEEDED = "not needed: remove it"
_BATCH = "not needed: spec.memory.microBatchTokens is the size of a micro-batch in tokens, Auto by default"
_KV_SHARE = "spec.memory.kvCache (an amount such as 8Gi, not a share; Auto by default)"
_ENGINE = "spec.rollout.engineArgs (as {name: value}, by vLLM's names)"
_GPUS = "spec.policy.gpusPerReplica"
_POD = "spec.policy.template.spec"
_RESOURCES = f"{_POD}.containers (resources of the container rljob; GPUs are gpusPerReplica)"

OPTION_NAMES: dict[str, str] = {
    "spec.algorithm.groupSize": (
        "n num_generations n_samples_per_prompt rollouts_per_example rollouts_per_prompt responses_per_prompt"
    ),
    "spec.algorithm.steps": "max_steps num_steps total_steps total_training_steps train_steps iterations",
    _NO_EPOCHS: "num_episodes num_train_epochs total_epochs epochs num_epochs",
    "spec.algorithm.updatesPerStep (each response is used once; a step's responses are split)": (
        "max_epochs ppo_epochs num_iterations"
    ),
    "spec.algorithm.updatesPerStep (each response is used once)": "update_epochs_per_batch",
    "spec.algorithm.promptsPerStep": "train_batch_size rollout_batch_size",
    "spec.algorithm.promptsPerStep (prompts; a step has promptsPerStep x groupSize responses)": "batch_size",
    "spec.algorithm.promptsPerStep (generation_batch_size / groupSize)": "generation_batch_size",
    "spec.algorithm.updatesPerStep": "steps_per_generation",
    "spec.algorithm.updatesPerStep (train_batch_size / ppo_mini_batch_size)": "ppo_mini_batch_size",
    "spec.algorithm.updatesPerStep (train_batch_size / policy_mini_batch_size)": "policy_mini_batch_size",
    "spec.algorithm.updatesPerStep (the number of parts of a step, not their size)": "mini_batch_size",
    _BATCH: (
        "per_device_train_batch_size micro_batch_size micro_train_batch_size micro_rollout_batch_size "
        "micro_batch_size_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size_per_gpu "
        "micro_forward_batch_size_per_gpu log_prob_micro_batch_size_per_gpu gradient_accumulation_steps "
        "use_dynamic_bsz auto_find_batch_size"
    ),
    _NOT_NEEDED: "packing_samples packing",
    "spec.memory.microBatchTokens": (
        "ppo_max_token_len_per_gpu max_token_len_per_gpu max_tokens_per_gpu max_tokens_per_microbatch "
        "max_tokens_per_mb log_prob_max_token_len_per_gpu"
    ),
    "spec.algorithm.learningRate": "lr actor_learning_rate",
    "spec.algorithm.learningRateSchedule.name": "lr_scheduler_type lr_scheduler lr_decay lr_decay_style",
    "spec.algorithm.learningRateSchedule.args": "lr_scheduler_kwargs",
    "spec.algorithm.learningRateSchedule.args (min_lr_rate, with name: cosine_with_min_lr)": "min_lr min_lr_ratio",
    "spec.algorithm.warmupSteps": "lr_warmup_steps num_warmup_steps",
    "spec.algorithm.warmupSteps (a number of steps)": "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    "spec.algorithm.adamBeta1 (and adamBeta2)": "betas",
    "spec.algorithm.adamBeta1": "beta1",
    "spec.algorithm.adamBeta2": "beta2",
    "spec.algorithm.weightDecay": "wd",
    "spec.algorithm.maxGradNorm": "grad_clip max_norm clip_grad gradient_clipping",
    "spec.policy.optimizer.moments (the optimizer is AdamW; int8 is like adamw_8bit)": (
        "optim optimizer.name optimizer.type"
    ),
    "spec.algorithm.klCoefficient": (
        "beta kl_coef kl_beta init_kl_coef kl_loss_coef kl_penalty_coef kl kl_weight kl_penalty"
    ),
    "spec.algorithm.klCoefficient (0: no KL divergence)": "use_kl_loss",
    "not supported: the KL divergence is part of the loss; write spec.algorithm.klCoefficient": "use_kl_in_reward",
    "only the estimator k3 is supported: write spec.algorithm.klCoefficient": "kl_loss_type",
    "not supported: the reference is the initial model": "sync_ref_model",
    "spec.algorithm.entropyCoefficient": "entropy_coeff entropy_coef entropy_loss_coef ent_coef",
    "spec.algorithm.clipLow (and clipHigh)": "epsilon eps_clip clip_ratio clip_range clip_eps",
    "spec.algorithm.clipLow": "eps_clip_low epsilon_low clip_ratio_low",
    "spec.algorithm.clipHigh": "eps_clip_high epsilon_high clip_ratio_high",
    "spec.algorithm.dualClip": "clip_ratio_c delta",
    "spec.algorithm.name (and lossAggregation, which its name decides if absent)": (
        "loss_type policy_loss_type loss_mode"
    ),
    "spec.algorithm.lossAggregation": "loss_agg_mode loss_reduction",
    "spec.algorithm.name": "adv_estimator advantage_estimator",
    "spec.algorithm.scaleAdvantages": "scale_rewards norm_adv_by_std_in_grpo grpo_norm_by_std",
    "spec.algorithm.name (gspo for a ratio of each response)": "importance_sampling_level",
    "spec.algorithm.importanceSampling.mode (and level: Token or Sequence)": (
        "vllm_importance_sampling_mode rollout_is"
    ),
    "spec.algorithm.importanceSampling.mode": "vllm_importance_sampling_correction use_tis",
    "spec.algorithm.importanceSampling.cap": "vllm_importance_sampling_cap tis_imp_ratio_cap rollout_is_threshold",
    "spec.algorithm.maskTruncated": "mask_truncated_completions overlong_filtering",
    "spec.algorithm.overlongPenalty (as overlongPenalty: {bufferTokens: 512})": (
        "overlong_buffer overlong_reward_shaping soft_overlong_punishment get_soft_overlong_punishment"
    ),
    "spec.algorithm.overlongPenalty.bufferTokens": (
        "overlong_buffer_len overlong_buffer.len soft_punish_cache overlong_penalty.buffer_length"
    ),
    "spec.algorithm.overlongPenalty.factor": "overlong_penalty_factor overlong_buffer.penalty_factor",
    "not supported; importanceSampling.mode: Mask drops single tokens": "off_policy_mask_threshold",
    "not supported: all tokens of a response are trained": "top_entropy_quantile",
    "spec.algorithm.dynamicSampling (as dynamicSampling: {})": "filter_groups dynamic_filtering",
    "spec.algorithm.dynamicSampling.maxRounds": "max_num_gen_batches max_sample_batches",
    "not needed: dynamicSampling compares rewards without the penalty for long responses": "filter_groups.metric",
    _NO_CRITIC: "gamma lam lambd critic critic_learning_rate",
    "spec.algorithm.maxStaleness": "max_async_level max_off_policy_steps staleness_threshold",
    "spec.algorithm.maxStaleness (1, with topology: Disaggregated)": "async_train",
    "spec.algorithm.partialRolloutPrompts": "partial_rollout",
    "spec.algorithm.maxResponseTokens": (
        "max_completion_length max_response_length max_new_tokens max_tokens max_generate_length generate_max_len "
        "max_output_tokens"
    ),
    "spec.algorithm.maxPromptTokens": "max_prompt_length max_input_length prompt_max_len",
    "spec.algorithm.maxPromptTokens (and maxResponseTokens: their sum is the length)": (
        "max_model_len vllm_max_model_length max_seq_length seq_len"
    ),
    "spec.task.overlongPrompts (Skip)": "filter_overlong_prompts",
    "spec.task.overlongPrompts (prompts are never truncated)": "truncation",
    "spec.algorithm.ignoreEndOfSequence": "ignore_eos",
    "spec.algorithm.temperature (and topP, topK, minP, stop)": "generation_kwargs sampling_params",
    _NO_PENALTIES: "repetition_penalty presence_penalty frequency_penalty",
    "spec.algorithm.stop (a list of strings)": "stop_strings stop_sequences",
    "spec.algorithm.stop (the text of the token)": "stop_token_ids",
    "multi-turn rollouts and tools are not supported yet": "multi_turn tools",
    "spec.model.uri": (
        "model_name_or_path model_name model_path base_model pretrain checkpoint_path model.name model.path "
        "model.id model.source model.url model.repo"
    ),
    "spec.model.uri (hf://org/name@revision)": "revision model_revision",
    "spec.model.dtype": "torch_dtype precision mixed_precision",
    "spec.model.dtype (bfloat16)": "bf16",
    "spec.model.dtype (bfloat16 or float32; float16 is not supported)": "fp16",
    "not supported: models with their own code cannot be trained": "trust_remote_code",
    "not needed: the trainer chooses the attention": "attn_implementation",
    "spec.policy.lora.rank": "lora.r lora_config.r peft_config.r lora_r lora_rank",
    "spec.policy.lora.alpha": "lora_alpha",
    "spec.policy.lora.dropout": "lora_dropout",
    "spec.policy.lora.targets": "target_modules lora_target_modules",
    "spec.policy.lora (as lora: {})": "use_peft use_lora",
    "spec.policy.lora": "peft_config lora_config peft",
    "not supported: adapters are trained, all other weights are frozen": "modules_to_save",
    "not supported: write spec.policy.lora.alpha (alpha x sqrt(rank) gives the scale of rsLoRA)": "use_rslora",
    "spec.policy.lora.export": "merge_adapter",
    "not supported: the weights of the policy are not quantized": "load_in_4bit load_in_8bit",
    "spec.task.args.path (a file or a data set of the hub, with task.name: dataset)": (
        "train_files train_dataset dataset_name prompt_data data_path dataset"
    ),
    "spec.task.args.path": "args.file args.train",
    "spec.task.args.dataFiles (with task.name: dataset)": "data_files args.files",
    "spec.task.args.name (with task.name: dataset)": "dataset_config dataset_config_name config_name subset",
    "spec.task.args.revision (with task.name: dataset)": "dataset_revision",
    "spec.task": "data",
    "spec.task (variables of the containers: spec.env)": "environment",
    "spec.task.args.promptField": "prompt_key input_key question_field prompt_column question_column",
    "spec.task.args.answerField": "label_key answer_key answer_column",
    "spec.task.args.split (with task.name: dataset)": "split dataset_train_split train_split",
    "not needed: rows stay on disk, mapped into memory": "streaming dataset_streaming",
    "spec.task.chatTemplateArgs": "chat_template_kwargs apply_chat_template_kwargs",
    "spec.task.chatTemplateArgs (as {enable_thinking: false})": "enable_thinking",
    "not needed: prompts are drawn in a random order, by spec.algorithm.seed": "shuffle",
    "spec.task.rewards (as [{function: module:function, weight: 1.0}])": "reward_funcs",
    "spec.task.rewards (weight of each)": "reward_weights",
    "spec.task.rewards (as [{name: reward_model, args: {url: ADDRESS, model: NAME}}])": (
        "reward_model reward_pretrain remote_rm_url"
    ),
    "spec.task.reward": "reward_function reward_fn custom_reward_function",
    "spec.task.chatTemplate": "apply_chat_template",
    "spec.task.systemPrompt": "system system_message",
    "spec.evaluation.args (such as path: test.jsonl; or heldOut, or task)": "test_files val_files eval_dataset",
    "spec.evaluation.temperature (and topP, samplesPerPrompt)": "val_kwargs",
    "spec.evaluation.everySteps": "eval_steps eval_interval eval_every test_freq",
    "spec.evaluation.everySteps (and atStart, atEnd)": "eval_strategy",
    "spec.evaluation": "eval validation",
    "spec.evaluation.atStart": "val_before_train eval_on_start",
    "spec.evaluation.samplesPerPrompt": "num_generations_eval eval_n_samples_per_prompt n_samples_per_eval_prompt",
    "spec.evaluation.prompts": "val_max_samples max_eval_samples",
    "spec.evaluation.keepBest (and bestMetric)": "load_best_model_at_end",
    "spec.evaluation.bestMetric": "metric_for_best_model",
    "spec.checkpoint.exportEverySteps": "hf_save_interval",
    "spec.checkpoint.everySteps": (
        "save_steps save_freq save_interval ckpt_interval checkpoint_interval checkpoint.interval checkpoint.every "
        "ckpt.interval"
    ),
    "spec.checkpoint.keep": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
    "spec.checkpoint.volume": "checkpoint.storage",
    "spec.checkpoint.volume (persistentVolumeClaim: {claimName: NAME})": "checkpoint.pvc",
    "spec.checkpoint.volume (rljob run: --output DIR)": "checkpoint.path",
    "not a field: rljob run --output DIR; in pods spec.checkpoint.volume": "output_dir default_local_dir ckpt_path",
    "not needed: a run resumes by itself": "resume_from_checkpoint resume_mode",
    "not a field: rljob export DIR --push-to-hub ORG/NAME": "push_to_hub hub_model_id",
    _TRACKING: f"use_wandb report_to logger logging {' '.join(TRACKERS)}",
    "spec.tracking (project of its element)": "project_name wandb_project trackio_project",
    "spec.tracking (args: {space_id: NAME} of its element)": "trackio_space_id",
    "spec.tracking (args: {entity: NAME} of its element)": "wandb_entity wandb_team_name",
    "not needed: remove it; every step is logged": "logging_steps",
    "spec.samples.perStep (samples are on by default)": (
        "log_completions num_completions_to_print log_val_generations rollout_data_dir"
    ),
    "metadata.name (or runName of an element of spec.tracking)": "run_name experiment_name",
    "spec.memory.activationCheckpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "spec.memory.optimizerOffload": "optimizer_cpu_offload adam_offload",
    "spec.memory.policyOffload": "param_offload",
    "spec.memory.optimizerOffload (and policyOffload)": "cpu_offload",
    "spec.memory.rolloutSleep": "free_cache_engine enable_sleep_mode vllm_enable_sleep vllm_enable_sleep_mode",
    _KV_SHARE: "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static",
    "spec.memory.kvCache": "kv_cache_memory_bytes",
    "spec.memory.logprobChunkTokens": "logprobs_chunk_size",
    "spec.memory.syncBucketSize (as 512Mi)": "update_weights_bucket_megabytes",
    "spec.memory.emptyCache": "torch_empty_cache_steps",
    "spec.rollout.tensorParallelSize": "tensor_model_parallel_size vllm_tensor_parallel_size tp tp_size",
    "spec.rollout.maxConcurrentSequences": "max_num_seqs",
    _ENGINE: (
        "max_num_batched_tokens enforce_eager enable_prefix_caching enable_chunked_prefill vllm engine_kwargs "
        "vllm_kwargs"
    ),
    "not needed: the engine is vLLM": "use_vllm rollout.engine inference_engine rollout.name",
    "not needed: the engine is vLLM and the policy uses FSDP2": "backend",
    "spec.topology (Colocated or Disaggregated)": "vllm_mode colocate colocate_all colocate_all_models",
    "spec.rollout.replicas (with topology: Disaggregated)": "vllm_num_engines",
    "not needed: the policy uses FSDP2 on all of its GPUs": "fsdp fsdp_config deepspeed zero_stage strategy",
    "not needed: layers are compiled where that is possible": "torch_compile",
    "not supported: the policy uses FSDP2 on all of its GPUs": "pipeline_parallel_size context_parallel_size",
    _GPUS: "n_gpus_per_node num_gpus_per_node actor_num_gpus_per_node gpus_per_node num_gpus gpus",
    "spec.policy.replicas": "nnodes num_nodes actor_num_nodes workers num_workers parallelism",
    _RESOURCES: "resources limits requests",
    f"{_POD}.containers": "containers",
    f"{_POD}.nodeSelector": "node_selector",
    f"{_POD}.tolerations": "tolerations",
    f"{_POD}.affinity": "affinity",
    f"{_POD}.volumes": "volumes",
    f"{_POD}.containers (volumeMounts of the container rljob)": "volume_mounts",
    f"{_POD}.serviceAccountName": "service_account_name",
    f"{_POD}.imagePullSecrets": "image_pull_secrets",
    f"{_POD}.priorityClassName": "priority_class_name",
    f"{_POD}.schedulerName": "scheduler_name",
    "not needed: recovery.maxRestarts limits the restarts": "restart_policy",
    "spec.recovery.maxRestarts": "backoff_limit max_retries",
    "spec.activeDeadlineSeconds": "timeout",
    "spec.ttlSecondsAfterFinished": "ttl",
    "spec.queueName": "queue",
    "spec.suspend": "paused",
    "spec.env": "env_vars",
    "spec.envFrom": "secrets",
    "not a field: the chart sets RLJob's image; another trainer's is spec.trainer.image": "image",
}
"""Names of options by RLJob's field, which may have a remark in brackets, or by the reason why RLJob has no such field.
A name with a dot counts only within that object."""

_NO_SUCH_LOSS = "not supported: write another name, or an own loss as algorithm.loss"
_PLUS_PLUS = "reinforce_plus_plus"

OPTION_VALUES: dict[str, dict[str, str]] = {
    "spec.algorithm.name": {
        "bnpo": "write grpo, whose lossAggregation is TokenMean",
        "token": "for a ratio of each token: write grpo",
        "sequence": "gspo",
        "sapo": _NO_SUCH_LOSS,
        "dppo": _NO_SUCH_LOSS,
        "vespo": _NO_SUCH_LOSS,
        "gpg": _NO_SUCH_LOSS,
        "remax": _NO_SUCH_LOSS,
        "opo": _NO_SUCH_LOSS,
        "geomean": _NO_SUCH_LOSS,
        "luspo": "write gspo, with lossAggregation: ConstantLength",
        "vanilla": "grpo",
        "reinforce": _PLUS_PLUS,
        "reinforce++": _PLUS_PLUS,
        "reinforce++baseline": f"{_PLUS_PLUS}_baseline",
        "ppo": "not supported, because there is no critic: write grpo",
        "gae": "not supported, because there is no critic: write grpo",
        "dpo": "not supported, because RLJob trains on rewards: write grpo",
        "sft": "not supported, because RLJob trains on rewards: write grpo",
    },
    "spec.algorithm.learningRateSchedule.name": {
        "constantwithwarmup": "write constant, and warmupSteps",
        "wsd": "warmup_stable_decay",
        "cosinewarmupwithminlr": "cosine_with_min_lr",
        "reducelronplateau": "not supported, because the rate must follow from the step: write cosine, for example",
        "greedy": "not supported, because the rate must follow from the step: write cosine, for example",
    },
    "spec.algorithm.lossAggregation": {
        "token": "TokenMean",
        "dapo": "TokenMean",
        "bnpo": "TokenMean",
        "seqmeantokenmean": "SequenceMean",
        "sequence": "SequenceMean",
        "grpo": "SequenceMean",
        "drgrpo": "ConstantLength",
        "seqmeantokensum": "ConstantLength",
        "seqmeantokensumnorm": "ConstantLength",
    },
    "spec.algorithm.scaleAdvantages": {
        "true": "Group",
        "std": "Group",
        "false": "None",
        "off": "None",
        "disabled": "None",
        "batch": "the deviation of the batch is that of name: reinforce_plus_plus_baseline: write Group or None",
    },
    "spec.algorithm.importanceSampling.mode": {
        "true": "Truncate",
        "auto": "Truncate",
        "enabled": "Truncate",
        "tis": "Truncate",
        "token": "Truncate",
        "tokentruncate": "Truncate",
        "tokenmask": "Mask",
        "icepop": "Mask",
        "sequence": "write Truncate, with level: Sequence",
        "sequencetruncate": "write Truncate, with level: Sequence",
        "sequencemask": "write Mask, with level: Sequence",
    },
    "spec.algorithm.topK": {"1": "0"},
    "spec.model.dtype": {
        "bf16": "bfloat16",
        "torch.bfloat16": "bfloat16",
        "fp32": "float32",
        "float": "float32",
        "float16": "not supported: write bfloat16",
        "fp16": "not supported: write bfloat16",
        "half": "not supported: write bfloat16",
        "fp8": "write spec.rollout.quantization for 8 bits in the engine, and bfloat16 here",
    },
    "spec.policy.lora": {"true": "write lora: {} for the defaults", "false": "remove the field"},
    "spec.policy.lora.targets": {
        "alllinear": "remove it: without targets, all linear layers get an adapter",
        "all": "remove it: without targets, all linear layers get an adapter",
        "auto": "remove it: without targets, all linear layers get an adapter",
    },
    "spec.memory.optimizerOffload": {
        **dict.fromkeys(("cpu", "true", "on", "yes", "1", "100"), "Enabled"),
        **dict.fromkeys(("none", "false", "off", "no", "0"), "Disabled"),
    },
    "spec.memory.policyOffload": {"cpu": "Enabled", "none": "Disabled"},
    "spec.policy.optimizer": {
        "adamw": "AdamW is the only optimizer: write optimizer: {moments: float32}",
        "adam": "AdamW is the only optimizer: write optimizer: {moments: float32}",
        "adamw8bit": "AdamW is the only optimizer: write optimizer: {moments: int8}",
    },
    "spec.policy.optimizer.moments": {
        "bf16": "bfloat16",
        "fp32": "float32",
        "8bit": "int8",
        "8": "int8",
        "adamw8bit": "int8",
        "fp8": "int8",
    },
    "spec.rollout.quantization": {
        "fp8": "Fp8PerTensor",
        "true": "Fp8PerTensor",
        "auto": "Disabled",
        "awq": "only 8-bit floating point is supported: write Fp8PerTensor, Fp8PerChannel or Fp8PerBlock",
        "gptq": "only 8-bit floating point is supported: write Fp8PerTensor, Fp8PerChannel or Fp8PerBlock",
        "int8": "only 8-bit floating point is supported: write Fp8PerTensor, Fp8PerChannel or Fp8PerBlock",
    },
    "spec.rollout.kvCacheDtype": {"fp8e4m3": "Fp8", "fp8e5m2": "Fp8", "disabled": "Auto", "false": "Auto"},
    "spec.task.chatTemplate": {"true": "Always", "false": "Never", "enabled": "Always", "disabled": "Never"},
    "spec.task.overlongPrompts": {
        "filter": "Skip",
        "drop": "Skip",
        "error": "Fail",
        "truncate": "prompts are never truncated: write Skip or Fail",
    },
    "spec.task.onRewardError": {"ignore": "Zero", "skip": "Zero", "0": "Zero", "raise": "Fail", "error": "Fail"},
    "spec.task.name": {
        "digit": "digits",
        "reasoninggym": "reasoning-gym",
        "json": "jsonl",
        "datasets": "dataset",
        "huggingface": "dataset",
        "hub": "dataset",
        "gsm8k": "there is no such task: write dataset with args: {path: openai/gsm8k, name: main, promptField: "
        "question}, and a reward",
        "math": "there is no such task: write dataset with args: {path: FILE}, and a reward",
        "parquet": "there is no such task: write dataset with args: {path: FILE}",
        "csv": "there is no such task: write dataset with args: {path: FILE}",
    },
    "spec.topology": {
        "colocate": "Colocated",
        "hybrid": "Colocated",
        "shared": "Colocated",
        "separate": "Disaggregated",
        "async": "Disaggregated",
        "server": "Disaggregated",
        "auto": "Colocated",
    },
    "spec.gang": {"true": "Auto", "enabled": "Auto", "kueue": "Kueue is used by queueName: write Auto"},
    "spec.memory.mode": {"true": "Auto", "enabled": "Auto", "off": "Disabled", "manual": "Disabled"},
    "spec.memory.rolloutSleep": {"true": "Level2", "enabled": "Level2", "1": "Level1", "2": "Level2", "0": "Disabled"},
    "spec.trainer.adapter": {
        "openrlhf": "no adapter is needed to run it: remove the field",
        "skyrl": "no adapter is needed to run it: remove the field",
        "primerl": "no adapter is needed to run it: remove the field",
        "transformers": "TRL",
    },
}
"""Value of RLJob, or a remark (a string with a space), by the field and the `normalized` value in the manifest."""


def normalized(name: str) -> str:
    """`name` without the differences between snake_case, camelCase and command-line options."""
    return name.replace("_", "").replace("-", "").replace(" ", "").lower()


_ADVICE = {normalized(name): advice for advice, names in OPTION_NAMES.items() for name in names.split()}


_PREFIX = re.compile(r"^(rollout|actor|vllm|trainer|train|data|grpo|policy|generator)(?=.)")


def option_advice(path: tuple[str, ...]) -> str | None:
    """The entry of `OPTION_NAMES` for the option at `path` with the longest matching name; None if there is none. A
    prefix that names a part of a trainer, as in rollout_n, is ignored."""
    parts = [part for name in path for part in normalized(name).split(".")]
    names = [*(".".join(parts[start:]) for start in range(len(parts))), _PREFIX.sub("", parts[-1])]
    return next((_ADVICE[name] for name in names if name in _ADVICE), None)
