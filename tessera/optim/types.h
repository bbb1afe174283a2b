// The optimizers that a configuration names and this library runs: one table, from which both front ends have names, defaults and
// bounds of their hyper-parameters.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"

namespace tessera::optim {

// A hyper-parameter, by its name in configurations and in param groups of torch.
struct Field {
  struct Pair {  // two numbers under one name, as betas
    double GroupOptions::*first, GroupOptions::*second;
    bool first_may_be_none = false;  // null, and None in Python: kOfDtype
  };
  using Where = std::variant<double GroupOptions::*, int64_t GroupOptions::*, bool GroupOptions::*, Pair>;
  const char* name;
  Where where;
  double least = -std::numeric_limits<double>::infinity();
  double below = std::numeric_limits<double>::infinity();  // never reached
  bool may_be_infinite = false;
};

struct Type {
  const char* name;
  Rule rule;
  GroupOptions defaults;
  std::vector<Field> fields;
};

struct OptimizerOptions {
  Rule rule = Rule::Adam;
  GroupOptions defaults;
  std::optional<GroupOptions> others = {};  // Muon: for parameters that are no matrices
  const Type* type = nullptr;               // the row, where a table has one
};

const std::vector<Type>& types();
// Finds a type by name in any letter case; null for an unknown one.
const Type* find_type(const std::string& name);
// The first type of the rule.
const Type& type_of(Rule rule);

// Types that no rule is for, by exact names: of torch::optim RMSprop, and Adam and AdamW for amsgrad; NAdam (momentum_decay in lr_decay),
// RAdam, Adamax, Adadelta (rho in alpha), ASGD, Rprop. C++ programs have them by Rule::External; Python takes torch.optim's.
const Type* find_torch_type(const std::string& name);
// What two optimizers must have alike for the states of one to mean the same to the other. `type`: a name of these tables, or a class of
// torch or Tessera with its path, as "torch.optim.adamw.AdamW". "Adam" for Adam and AdamW; empty for a client's own class, of
// which nothing is known.
std::string family_of(const std::string& type);
// Whether an optimizer of the family may have a state of that name, which is one of state_names() of some rule; true where nothing is
// known of either.
bool may_have_state(const std::string& family, const std::string& state);
// All that a configuration can name in C++, for messages.
std::string cpp_types();
// How many values a type keeps for each element beside the master; for Muon the most, of parameters that are no matrices.
int state_count(const OptimizerOptions& options);

// Whether a kernel updates any range of elements; false for those that need whole parameters, and for External.
bool has_kernel(Rule rule);
// Whether an update needs whole parameters (whole.h): Lamb, Muon and Adafactor.
bool needs_whole(Rule rule);
// The names of types with a kernel, for messages: "Adam, AdamW, SGD, Lion, Adagrad".
std::string native_types();
// Whether `type` is one of these, in any letter case.
bool is_native_type(const std::string& type);
// Rule and defaults of a type of the table; value error that lists the types for another. "adam" gives AdamW's arithmetic unless
// `adam_w_mode` is false (DeepSpeed's rule).
OptimizerOptions options_of_type(const std::string& type, bool adam_w_mode = true);

// What is out of its bounds, no finite number, or wrong_together(): "lr must be >= 0, got -1; ..."; empty where nothing is.
std::string wrong_in(const Type& type, const GroupOptions& group);
// A rule that says what fields must be together, and is not kept; its field for a report.
struct Together {
  const char* field;
  std::string text;
};
std::optional<Together> wrong_together(const Type& type, const GroupOptions& group);
// Value error that says it, with the type's name as its origin, or `origin`, and the number of the param group if it is given.
void check(const Type& type, const GroupOptions& group, const std::string& origin = "",
           std::optional<size_t> number = {});
// Gives param groups of a type what a schedule says of momentum: the first of their betas where the type has them. Classes of torch
// give others their momentum; value error where a type has neither.
void put_momenta(const Type& type, const ScheduleOptions& schedule, const std::vector<double>& momenta,
                 std::vector<GroupOptions>& groups);
// Value error for a schedule of torch that moves momentum, of an optimizer that has none.
void check_has_momentum(const ScheduleOptions& schedule, bool has);
// The group's fields as text, "lr 0.001, betas (0.9, 0.999), ...": for ranks to compare.
std::string text_of(const Type& type, const GroupOptions& group);

}  // namespace tessera::optim
