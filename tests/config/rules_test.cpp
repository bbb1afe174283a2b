#include "tessera/config/rules.h"

#include "support.h"

namespace tessera::config {
namespace {

struct RuleRow {
  const char* json;
  const char* error;  // part of the message; nullptr: accepted
};

void expect_rows(const std::vector<RuleRow>& rows) {
  for (const RuleRow& row : rows) {
    const std::string text = json_error(row.json);
    if (row.error) {
      EXPECT_HAS(text, row.error) << row.json;
    } else {
      EXPECT_EQ(text, "") << row.json;
    }
  }
}

TEST(Rules, Amp) {
  expect_rows({
      {R"({"amp": {"enabled": true}, "zero_optimization": {"stage": 1}})", "amp: cannot be combined with zero"},
      {R"({"amp": {"enabled": true}, "bf16": {"enabled": true}})", "amp: cannot be combined with fp16 or bf16"},
  });
}

TEST(Rules, LossScale) {
  expect_rows({
      {R"({"fp16": {"enabled": true, "loss_scale_window": 0}})", "fp16.loss_scale_window"},
      {R"({"fp16": {"enabled": true, "min_loss_scale": -1}})", "fp16.min_loss_scale"},
      {R"({"fp16": {"enabled": true, "loss_scale": 128, "loss_scale_window": 0}})", nullptr},
      {R"({"fp16": {"enabled": false, "loss_scale_window": 0}})", nullptr},
      {R"({"fp16": {"enabled": true, "initial_scale_power": 127}})", nullptr},
      {R"({"fp16": {"enabled": true, "initial_scale_power": 128}})", "fp16.initial_scale_power"},
      {R"({"fp16": {"enabled": true, "loss_scale": 1, "initial_scale_power": 128}})", nullptr},
      {R"({"fp16": {"enabled": true, "loss_scale": 1e39}})", "fp16.loss_scale"},
      {R"({"fp16": {"loss_scale": -1}})", "fp16.loss_scale"},
      {R"({"fp16": {"loss_scale": Infinity}})", "fp16.loss_scale"},
      {R"({"fp16": {"loss_scale_window": 1.5}})", "fp16.loss_scale_window"},
  });
}

TEST(Rules, Clipping) {
  expect_rows({
      {R"({"tessera": {"clip": "global"}})", nullptr},
      {R"({"tessera": {"clip": "previous", "update_in_backward": true}})", nullptr},
      {R"({"tessera": {"clip": "unit", "clip_by_unit": false, "update_in_backward": true}})", nullptr},
      {R"({"tessera": {"clip": null, "clip_by_unit": true, "update_in_backward": true}})", nullptr},
      {R"({"gradient_clipping": 0, "tessera": {"clip": "previous", "update_in_backward": true}})", nullptr},
      {R"({"tessera": {"clip": "previous"}})", "tessera.clip: needs tessera.update_in_backward"},
      {R"({"tessera": {"clip_by_unit": true}})", "tessera.clip_by_unit: needs tessera.update_in_backward"},
      {R"({"tessera": {"clip": "previous", "clip_by_unit": true, "update_in_backward": true}})",
       "tessera.clip: is \"previous\" beside clip_by_unit"},
      {R"({"tessera": {"clip": "global", "clip_by_unit": true, "update_in_backward": true}})", "keep one"},
      {R"({"tessera": {"clip": "last"}})", "tessera.clip"},
  });
}

TEST(Rules, LowPrecisionStates) {
  expect_rows({
      {R"({"bf16": {"bf16_master_weights_and_grads": true, "bf16_optimizer_states": true},
           "zero_optimization": {"stage": 2}})",
       nullptr},
      {R"({"bf16": {"bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}})",
       "needs zero_optimization"},
      {R"({"bf16": {"bf16_optimizer_states": true}, "zero_optimization": {"stage": 1}})",
       "bf16.bf16_optimizer_states: needs bf16_master"},
      {R"({"bf16": {"bf16_master_weights_and_grads": true}, "zero_optimization": {"stage": 1}})",
       "bf16.bf16_master_weights_and_grads: needs bf16_optimizer_states"},
      {R"({"bf16": {"bf16_master_weights_and_grads": true},
           "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})",
       nullptr},
      {R"({"fp16": {"enabled": true, "fp16_master_weights_and_grads": true},
           "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}})",
       nullptr},
      {R"({"fp16": {"fp16_master_weights_and_gradients": true}, "zero_optimization": {"stage": 1}})",
       "fp16.fp16_master_weights_and_grads: needs zero_optimization.offload_optimizer"},
      {R"({"fp16": {"fp16_master_weights_and_grads": true}, "zero_optimization": {"stage": 1},
           "tessera": {"state_bytes": 16}})",
       "or tessera.state_bytes 12"},
      {R"({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}, "zero_optimization": {"stage": 1},
           "tessera": {"state_bytes": 12}})",
       nullptr},
      {R"({"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}, "zero_optimization": {"stage": 1},
           "tessera": {"state_bytes": 12}})",
       nullptr},
      {R"({"fp16": {"fp16_master_weights_and_grads": true}, "bf16": {"bf16_master_weights_and_grads": true},
           "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})",
       "cannot be combined with bf16"},
  });
}

TEST(Rules, Zero) {
  expect_rows({
      {R"({"zero_optimization": {"legacy_stage1": true}})", "legacy_stage1"},
      {R"({"zero_optimization": {"stage": 2, "allgather_bucket_size": 101}})", "nccl_start_alignment_factor"},
      {R"({"zero_optimization": {"stage": 0, "allgather_bucket_size": 101}})", nullptr},
      {R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})", nullptr},
      {R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": "auto"}}})", nullptr},
      {R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}})",
       "ratio: must be number from 0 to 1, or auto, got 1.5"},
      {R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": "all"}}})",
       "ratio: must be number from 0 to 1, or auto, got \"all\""},
      {R"({"tessera": {"device_share": -0.5}})", "device_share: must be number from 0 to 1, or auto"},
      {R"({"tessera": {"device_share": "half"}})", "device_share: must be number from 0 to 1, or auto"},
      {R"({"tessera": {"device_reserve": 2}})", "device_reserve: must be number from 0 to 1"},
      {R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})", "device: needs stage 1, 2 or 3"},
      {R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}})", "nvme_path: is missing"},
      {R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}})",
       nullptr},
      {R"({"zero_optimization": {"stage": 2}, "prescale_gradients": true})", "prescale_gradients"},
      {R"({"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 2})", "gradient_predivide_factor"},
      {R"({"zero_optimization": {"stage": 2, "reduce_scatter": false}, "prescale_gradients": true})", nullptr},
      {R"({"zero_optimization": {"stage": 1}, "prescale_gradients": true, "gradient_predivide_factor": 2})", nullptr},
      {R"({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}})", nullptr},
      {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})",
       "offload_param.nvme_path: is missing"},
      {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "tessera": {"shared_parameters": true}})",
       "cannot be combined with tessera.shared_parameters"},
      {R"({"torch_autocast": {"enabled": true}, "zero_optimization": {"zero_quantized_weights": true}})",
       "torch_autocast"},
  });
}

TEST(Rules, GradientOpAndUnmanagedAccumulation) {
  expect_rows({
      {R"({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}})", "gradient_allreduce_op"},
      {R"({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}})", nullptr},
      {R"({"gradient_allreduce_op": "sum", "compile": {"deepcompile": true}})", "gradient_allreduce_op"},
      {R"({"managed_gradient_accumulation": false, "zero_optimization": {"stage": 1, "overlap_comm": true}})",
       "overlap_comm in stages 0 and 1"},
      {R"({"managed_gradient_accumulation": false, "zero_optimization": {"stage": 2, "overlap_comm": true}})", nullptr},
      {R"({"managed_gradient_accumulation": false, "zero_optimization": {"stage": 1}})", nullptr},
      {R"({"managed_gradient_accumulation": false, "compile": {"deepcompile": true}})", "compile.deepcompile"},
  });
}

TEST(Rules, Optimizer) {
  expect_rows({
      {R"({"optimizer": {"params": {"lr": 1}}})", "optimizer.type: is required"},
      {R"({"scheduler": {"params": {"a": 1}}})", "scheduler.type: is required"},
      {R"({"optimizer": {"type": "NAdam"}, "zero_optimization": {"stage": 1}})", "zero_allow_untested_optimizer"},
      {R"({"optimizer": {"type": "NAdam"}, "zero_optimization": {"stage": 1},
           "zero_allow_untested_optimizer": true})",
       nullptr},
      {R"({"optimizer": {"type": "NAdam"}})", nullptr},
      {R"({"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 2}})", nullptr},
      {R"({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 1}})", "OneBitAdam cannot be combined"},
      {R"({"optimizer": {"type": "Lamb"}, "fp16": {"enabled": true, "loss_scale": 8}})", "dynamic loss scale"},
      {R"({"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 3}})", "reduce_scatter"},
      {R"({"optimizer": {"type": "NAdam", "params": {"max_grad_norm": 1}}})", "use gradient_clipping"},
  });
}

TEST(Rules, TensorParallel) {
  expect_rows({
      {R"({"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}})", "tensor_parallel.tp.tp_size"},
      {R"({"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 4}}})", nullptr},
      {R"({"tensor_parallel": {"autotp_size": 4}})", nullptr},
  });
}

}  // namespace
}  // namespace tessera::config
