// Update rules over vectors. The arithmetic and its order are those of reference.cpp, so the bits
// are too.
#pragma once

#include <type_traits>

#include "tessera/kernels/split.inc.h"
#include "tessera/kernels/table.h"
#include "tessera/kernels/update.h"
#include "tessera/kernels/vec.inc.h"

namespace tessera::kernels {
namespace {

// Note [Division by a constant]
// x / b, correctly rounded, by a product and two fused operations: with y = 1/b rounded, q = x*y and r = x - b*q, it is
// q + r*y (Markstein, IBM J. R&D 34, 1990; Brisebarre, Muller & Raina, IEEE TC 53, 2004). The divider, which Adam needs
// twice besides, would take several times as long. Nothing may underflow or overflow on the way: b is ordinary() and x
// is 0, of at least 2^-80, infinite or NaN.
struct Divisor {
  F b, y;

  explicit Divisor(float divisor) : b(splat(divisor)), y(splat(1.0f / divisor)) {}
  static bool ordinary(float b) { return b >= 0x1p-20f && b <= 0x1p20f; }
  TESSERA_INLINE F divide(F x) const {
    const F q = x * y;
    const F exact = fma(fma(-b, q, x), y, q);
    return x < splat(__builtin_inff()) ? exact : q;
  }
};

// Note [Two halves of an update]
// The square root and the quotient of Adam and Adagrad take longer than the processor looks ahead, so that it would wait
// for them. Hence every rule has two halves: begin() maps (w, g, state) of one vector to new states and a first part of
// the new w, end() adds what was still on its way; the loop ends a step only after it has begun the next one.
// What passes from one half to the other (Late) are plain vectors: compilers keep structures of vectors in memory. To need
// fewer of them, a 16-bit w is loaded in end() where begin() has no use for it (`weight_first` is false).

// Each rule holds its constants. The loop is compiled for each type of gradient, with and without an L2 term (`l2`), so that
// nothing is left in it to choose that is not rare: where the code of a jump comes to lie may cost a third of the time.
// `common` Adam: no L2 term, beta1 above 0.5.
template <bool common>
struct AdamStep {
  static constexpr int states = 2;
  static constexpr bool weight_first = !common;
  F decay, weight_decay, mix, beta2, rest2, eps, minus_step_size;
  Divisor sqrt_bias2;
  bool add_l2, mix_from_grad;

  explicit AdamStep(const AdamRule& r)
      : decay(splat(static_cast<float>(r.decoupled ? 1 - r.lr * r.weight_decay : 1))),
        weight_decay(splat(static_cast<float>(r.weight_decay))),
        beta2(splat(static_cast<float>(r.beta2))),
        rest2(splat(static_cast<float>(1 - r.beta2))),
        eps(splat(static_cast<float>(r.eps))),
        minus_step_size(splat(static_cast<float>(-(r.lr / r.bias1)))),
        sqrt_bias2(static_cast<float>(r.sqrt_bias2)),
        add_l2(!r.decoupled && static_cast<float>(r.weight_decay) != 0) {
    const float rest1 = static_cast<float>(1 - r.beta1);
    mix_from_grad = !(rest1 < 0.5f);
    mix = splat(mix_from_grad ? rest1 - 1.0f : rest1);
  }
  TESSERA_INLINE void begin(F& w, F g, F& m, F& v, F& numerator, F& root) const {
    if (!common && add_l2) [[likely]]
      g = fma(weight_decay, w, g);
    m = fma(mix, g - m, !common && mix_from_grad ? g : m);
    v = fma(rest2 * g, g, v * beta2);
    numerator = minus_step_size * m;
    root = square_root(v);
  }
  TESSERA_INLINE F end(F w, F numerator, F root) const {
    return w * decay + numerator / (sqrt_bias2.divide(root) + eps);
  }
};

template <bool l2>
struct SgdStep {
  static constexpr int states = 0;
  static constexpr bool weight_first = true;
  F weight_decay, minus_lr;

  explicit SgdStep(const SgdRule& r)
      : weight_decay(splat(static_cast<float>(r.weight_decay))), minus_lr(splat(static_cast<float>(-r.lr))) {}
  TESSERA_INLINE void begin(F& w, F g, F&, F&, F&, F&) const {
    if constexpr (l2) g = fma(weight_decay, w, g);
    w = fma(minus_lr, g, w);
  }
  TESSERA_INLINE F end(F w, F, F) const { return w; }
};

template <bool l2>
struct MomentumStep {
  static constexpr int states = 1;
  static constexpr bool weight_first = true;
  F weight_decay, minus_lr, momentum, undamped;
  bool nesterov, first;

  explicit MomentumStep(const SgdRule& r)
      : weight_decay(splat(static_cast<float>(r.weight_decay))),
        minus_lr(splat(static_cast<float>(-r.lr))),
        momentum(splat(static_cast<float>(r.momentum))),
        undamped(splat(static_cast<float>(1 - r.dampening))),
        nesterov(r.nesterov),
        first(r.first_step) {}
  TESSERA_INLINE void begin(F& w, F g, F& buf, F&, F&, F&) const {
    if constexpr (l2) g = fma(weight_decay, w, g);
    buf = fma(undamped, g, buf * momentum);
    if (first) [[unlikely]]
      buf = g;
    F way = buf;
    if (nesterov) [[unlikely]]
      way = fma(momentum, buf, g);
    w = fma(minus_lr, way, w);
  }
  TESSERA_INLINE F end(F w, F, F) const { return w; }
};

struct LionStep {
  static constexpr int states = 1;
  static constexpr bool weight_first = true;
  F decay, beta1, rest1, beta2, rest2, lr;

  explicit LionStep(const LionRule& r)
      : decay(splat(static_cast<float>(1 - r.lr * r.weight_decay))),
        beta1(splat(static_cast<float>(r.beta1))),
        rest1(splat(static_cast<float>(1 - r.beta1))),
        beta2(splat(static_cast<float>(r.beta2))),
        rest2(splat(static_cast<float>(1 - r.beta2))),
        lr(splat(static_cast<float>(r.lr))) {}
  TESSERA_INLINE void begin(F& w, F g, F& m, F&, F&, F&) const {
    w = w * decay - times_sign(lr, fma(rest1, g, m * beta1));
    m = fma(rest2, g, m * beta2);
  }
  TESSERA_INLINE F end(F w, F, F) const { return w; }
};

template <bool l2>
struct AdagradStep {
  static constexpr int states = 1;
  static constexpr bool weight_first = true;
  F weight_decay, minus_clr, eps;

  explicit AdagradStep(const AdagradRule& r)
      : weight_decay(splat(static_cast<float>(r.weight_decay))),
        minus_clr(splat(static_cast<float>(-r.clr))),
        eps(splat(static_cast<float>(r.eps))) {}
  TESSERA_INLINE void begin(F& w, F g, F& sum, F&, F& numerator, F& root) const {
    if constexpr (l2) g = fma(weight_decay, w, g);
    sum = fma(g, g, sum);
    numerator = minus_clr * g;
    root = square_root(sum);
  }
  TESSERA_INLINE F end(F w, F numerator, F root) const { return w + numerator / (root + eps); }
};

// Where the master weights are (UpdateRange): load and store them, by bounds as of Random if `stochastic`. `natural`: this
// order is the faster one where the states are fp32, too. `bytes`: of all its streams, an element.
template <class Weight, bool adopts = false>
struct Fp32Master {  // and a copy of type Weight, or None
  static constexpr bool stochastic = false, natural = true;
  static constexpr int bytes = F32::bytes + Weight::bytes;
  float* master;
  void* weight;
  explicit Fp32Master(const UpdateRange& r) : master(r.master), weight(r.weight) {}
  TESSERA_INLINE void prefetch(int64_t i) const {
    F32::prefetch(master, i);
    Weight::prefetch(weight, i);
  }
  template <Order order, class Lanes>
  TESSERA_INLINE Pair load(int64_t i, Lanes lanes) const {
    const Pair w = F32::load<order>(master, i, lanes);
    if constexpr (adopts) {
      const Pair written = Weight::template load<order>(weight, i, lanes);
      return {held(w.a, written.a), held(w.b, written.b)};
    }
    return w;
  }
  template <Order order, class Lanes>
  TESSERA_INLINE void store(int64_t i, Lanes lanes, const Pair& w, U) const {
    F32::store<order>(master, i, lanes, w);
    Weight::template store<order>(weight, i, lanes, w);
  }

 private:
  // The master, where the weight is its rounding, else the weight; a NaN is no master's rounding.
  static TESSERA_INLINE F held(F w, F written) {
    const F rounded = w == w ? Weight::rounded(w) : w;
    return rounded == written ? w : written;
  }
};

struct SplitMaster {
  static constexpr bool stochastic = false, natural = false;
  static constexpr int bytes = 2 * Halves::bytes;
  void* weight;
  void* residual;
  explicit SplitMaster(const UpdateRange& r) : weight(r.weight), residual(r.residual) {}
  TESSERA_INLINE void prefetch(int64_t i) const {
    Halves::prefetch(weight, i);
    Halves::prefetch(residual, i);
  }
  template <Order order, class Lanes>
  TESSERA_INLINE Pair load(int64_t i, Lanes lanes) const {
    return SplitHalves::load<order>(weight, residual, i, lanes);
  }
  template <Order order, class Lanes>
  TESSERA_INLINE void store(int64_t i, Lanes lanes, const Pair& w, U) const {
    SplitHalves::store<order>(weight, residual, i, lanes, w);
  }
};

template <class Type>
struct WeightMaster {
  static constexpr bool stochastic = Type::stochastic, natural = Type::natural;
  static constexpr int bytes = Type::bytes;
  void* weight;
  explicit WeightMaster(const UpdateRange& r) : weight(r.weight) {}
  TESSERA_INLINE void prefetch(int64_t i) const { Type::prefetch(weight, i); }
  template <Order order, class Lanes>
  TESSERA_INLINE Pair load(int64_t i, Lanes lanes) const {
    return Type::template load<order>(weight, i, lanes);
  }
  template <Order order, class Lanes>
  TESSERA_INLINE void store(int64_t i, Lanes lanes, const Pair& w, U bound) const {
    if constexpr (stochastic) {
      Type::template store<order>(weight, i, lanes, w, bound);
    } else {
      Type::template store<order>(weight, i, lanes, w);
    }
  }
};

// A step of the loop between its halves.
struct Late {
  F w_a, w_b, numerator_a, numerator_b, root_a, root_b;
  U bound;  // for rounding the weights
  TESSERA_INLINE Late& operator=(const Late& x) {
    w_a = x.w_a, w_b = x.w_b;
    numerator_a = x.numerator_a, numerator_b = x.numerator_b;
    root_a = x.root_a, root_b = x.root_b;
    bound = x.bound;
    return *this;
  }
};

template <class Master, class State, class Grad, class Step>
void update_typed(const Step& rule, const UpdateRange& range, float grad_scale) {
  // fp32 masters come at the speed of memory, which suffers when they are asked for late; fp16 ones gain nothing by it.
  constexpr bool weight_first = Step::weight_first || Master::natural;
  constexpr Order order = Master::natural && State::bytes == 4 ? Order::Natural : Order::EvenOdd;
  // Local copies: a store through a char pointer could change the originals for all the compiler
  // knows.
  const Step step = rule;
  const F scale = splat(grad_scale);
  const Master master(range);
  const void* const grad = range.grad;
  void* const state0 = range.state0;
  void* const state1 = range.state1;
  Roots roots(range.random);
  const auto prefetch = [=](int64_t i) __attribute__((always_inline)) {
    master.prefetch(i);
    Grad::prefetch(grad, i);
    if constexpr (Step::states > 0) State::prefetch(state0, i);
    if constexpr (Step::states > 1) State::prefetch(state1, i);
  };
  using Drawn = Random<State::stochastic || Master::stochastic>;
  const auto begin = [=, &roots](Late& late, int64_t i, auto lanes) __attribute__((always_inline)) {
    const Drawn random(roots);  // drawing takes long, so it comes first
    Pair w{}, s0{}, s1{};
    if constexpr (weight_first) w = master.template load<order>(i, lanes);
    const Pair g = Grad::template load<order>(grad, i, lanes);
    if constexpr (Step::states > 0) s0 = State::template load<order>(state0, i, lanes);
    if constexpr (Step::states > 1) s1 = State::template load<order>(state1, i, lanes);
    step.begin(w.a, g.a * scale, s0.a, s1.a, late.numerator_a, late.root_a);
    step.begin(w.b, g.b * scale, s0.b, s1.b, late.numerator_b, late.root_b);
    if constexpr (weight_first) late.w_a = w.a, late.w_b = w.b;
    if constexpr (Master::stochastic) late.bound = random.template bounds<kWeight>();
    if constexpr (Step::states > 0) put<order, State, kState0>(state0, i, lanes, s0, random);
    if constexpr (Step::states > 1) put<order, State, kState1>(state1, i, lanes, s1, random);
  };
  const auto end = [=](const Late& late, int64_t i, auto lanes) __attribute__((always_inline)) {
    Pair w{late.w_a, late.w_b};
    if constexpr (!weight_first) w = master.template load<order>(i, lanes);
    const F a = step.end(w.a, late.numerator_a, late.root_a), b = step.end(w.b, late.numerator_b, late.root_b);
    master.template store<order>(i, lanes, {a, b}, late.bound);
  };
  const int64_t distance = elements_ahead(Master::bytes + Grad::bytes + Step::states * State::bytes);
  for_each_pair<Late>(range.n, distance, prefetch, begin, end);
}

template <class Master, class State, class Step>
void update_streams(const Step& step, const UpdateRange& range, float grad_scale) {
  with_type(range.grad_dtype, [&](auto type) { update_typed<Master, State, decltype(type)>(step, range, grad_scale); });
}

// Calls call() with the type of 16-bit weights, which are not fp16 beside 16-bit states (UpdateRange).
template <class State, class OfBf16, class OfF16, class Call>
void with_weight(DType dtype, const Call& call) {
  if constexpr (State::bytes == 4) {
    if (dtype == DType::F16) return call(OfF16{});
  }
  call(OfBf16{});
}

template <class State, class Step>
void update_masters(const Step& step, const UpdateRange& range, float grad_scale) {
  if (range.master != nullptr) {
    if (range.weight == nullptr) return update_streams<Fp32Master<None>, State>(step, range, grad_scale);
    return with_weight<State, Bf16, F16>(range.weight_dtype, [&](auto type) {
      using Weight = decltype(type);
      if (range.adopts) return update_streams<Fp32Master<Weight, true>, State>(step, range, grad_scale);
      update_streams<Fp32Master<Weight>, State>(step, range, grad_scale);
    });
  }
  if (range.residual != nullptr) return update_streams<SplitMaster, State>(step, range, grad_scale);
  const auto update_alone = [&](auto type) {
    update_streams<WeightMaster<decltype(type)>, State>(step, range, grad_scale);
  };
  // All roundings of a range are of one kind.
  if (range.rounding == Rounding::Stochastic) {
    if constexpr (State::stochastic || State::bytes == 4)
      with_weight<State, Bf16Stochastic, F16Stochastic>(range.weight_dtype, update_alone);
  } else {
    if constexpr (!State::stochastic) with_weight<State, Bf16, F16>(range.weight_dtype, update_alone);
  }
}

template <class Step>
void update_any(const Step& step, const UpdateRange& range, float grad_scale) {
  if constexpr (Step::states > 0) {
    if (range.state_dtype != DType::F32) {
      if (range.rounding == Rounding::Nearest) return update_masters<Bf16>(step, range, grad_scale);
      return update_masters<Bf16Stochastic>(step, range, grad_scale);
    }
  }
  update_masters<F32>(step, range, grad_scale);
}

// The part of a range that the vectors update once the reference has updated the elements of a random word that begins before it.
template <class Rule>
UpdateRange whole_words(const Rule& rule, const UpdateRange& range, float grad_scale,
                        void (*reference)(const Rule&, const UpdateRange&, float)) {
  const int64_t first = range.rounding == Rounding::Stochastic ? inside_word(range.random, range.n) : 0;
  if (first == 0) return range;
  reference(rule, part(range, 0, first), grad_scale);
  return part(range, first, range.n);
}

// Calls call() with whether there is an L2 term.
template <class Call>
void with_l2(double weight_decay, const Call& call) {
  if (static_cast<float>(weight_decay) != 0) return call(std::true_type{});
  call(std::false_type{});
}

void adam(const AdamRule& rule, const UpdateRange& all, float grad_scale) {
  if (!Divisor::ordinary(static_cast<float>(rule.sqrt_bias2))) return reference_table().adam(rule, all, grad_scale);
  const UpdateRange range = whole_words(rule, all, grad_scale, reference_table().adam);
  const AdamStep<true> common(rule);
  if (!common.add_l2 && !common.mix_from_grad) return update_any(common, range, grad_scale);
  update_any(AdamStep<false>(rule), range, grad_scale);
}
void sgd(const SgdRule& rule, const UpdateRange& all, float grad_scale) {
  const UpdateRange range = whole_words(rule, all, grad_scale, reference_table().sgd);
  with_l2(rule.weight_decay, [&](auto l2) {
    if (rule.momentum == 0) return update_any(SgdStep<l2>(rule), range, grad_scale);
    update_any(MomentumStep<l2>(rule), range, grad_scale);
  });
}
void lion(const LionRule& rule, const UpdateRange& range, float grad_scale) {
  update_any(LionStep(rule), whole_words(rule, range, grad_scale, reference_table().lion), grad_scale);
}
void adagrad(const AdagradRule& rule, const UpdateRange& all, float grad_scale) {
  const UpdateRange range = whole_words(rule, all, grad_scale, reference_table().adagrad);
  with_l2(rule.weight_decay, [&](auto l2) { update_any(AdagradStep<l2>(rule), range, grad_scale); });
}

}  // namespace
}  // namespace tessera::kernels
