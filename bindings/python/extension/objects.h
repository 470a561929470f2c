// The objects of Python.
#pragma once

#include "arrays.h"
#include "handles.h"
#include "waiting.h"

struct ContextObject {
    Closable<ta::Context> handle;
    bool cuda;
};

struct PoolObject {
    Closable<ta::Pool> handle;
    bool cuda;
    nb::object peer;  // of its peer tier, or None
};
nb::object describe(const PoolObject& self);  // a PoolDescription

// Shared with calls that run.
struct SequenceObject {
    Closable<std::shared_ptr<const ta::Sequence>> handle;
    explicit SequenceObject(ta::Sequence sequence)
        : handle(std::make_shared<const ta::Sequence>(std::move(sequence)), "the sequence") {}
};

struct PlanObject {
    Closable<ta::Plan> handle;
    Handle<std::shared_ptr<ta_kv_pool>> pool;
    Place place;
    std::shared_ptr<const std::vector<int64_t>> v_head_dims;  // [layers]
};

// An open step. The plan is dropped when it is over, with the GIL held; a call that runs has its own copy.
class StepObject {
  public:
    // Of a plan that is open on so many sequences.
    StepObject(std::shared_ptr<ta_plan> handle, const PlanObject& plan, size_t sequences)
        : plan_(std::move(handle)), place_(plan.place), v_head_dims_(plan.v_head_dims), sequences_(sequences) {}
    StepObject(StepObject&&) noexcept = default;
    ~StepObject() { leave(); }

    const Place& place() const { return place_; }
    bool open() const { return plan_ != nullptr; }
    Borrowed<std::shared_ptr<ta_plan>> get() const {
        if (!plan_) throw ta::Error(TA_E_STATE, "the step is over");
        return Borrowed(plan_);
    }
    // Of a layer; 0: there is no such layer.
    int64_t v_head_dim(uint32_t layer) const { return layer < v_head_dims_->size() ? (*v_head_dims_)[layer] : 0; }
    size_t sequences() const { return sequences_; }
    // `keep`: null, or one number for each sequence.
    void end(const int32_t* keep = nullptr) {
        const auto plan = get();
        call([&](ta_error* e) { return ta_plan_end(plan.get(), keep, e); });
        plan_.reset();
    }
    void abort() {
        const auto plan = get();
        plan_.reset();
        call([&](ta_error* e) { return ta_plan_abort(plan.get(), e); });
    }
    // Aborts what is open.
    void leave() {
        if (plan_)
            unlocked([plan = std::exchange(plan_, nullptr)]() mutable { ta_plan_abort(plan.get(), nullptr), plan.reset(); });
    }

  private:
    std::shared_ptr<ta_plan> plan_;
    Place place_;
    std::shared_ptr<const std::vector<int64_t>> v_head_dims_;
    size_t sequences_;
};

struct NamespaceObject {
    Handle<ta::Namespace> handle;
};

struct MoveObject {
    Handle<ta::Move> handle;
};

struct GroupObject {
    Closable<ta::Group> handle;
};

// A transfer. One with a pool ends as a ta::Transfer does: it is cancelled, and a sequence that comes all the same is released.
struct TransferObject {
    Handle<std::shared_ptr<ta_group>> group;
    ta_ticket ticket;
    Handle<std::shared_ptr<ta_kv_pool>> pool;  // of a receive whose sequence was not taken

    TransferObject(std::shared_ptr<ta_group> of, ta_ticket number, std::shared_ptr<ta_kv_pool> into = nullptr)
        : group(std::move(of)), ticket(number), pool(std::move(into)) {}
    TransferObject(TransferObject&&) noexcept = default;
    ~TransferObject() {
        if (pool.get()) unlocked([&] { const ta::Transfer receive(group.get(), ticket, pool.get()); });
    }

    ta_transfer_info wait(std::optional<double> seconds) const {
        const ta::Transfer transfer(group.get(), ticket);
        ta_transfer_info info;
        wait_for(seconds, [&](std::chrono::nanoseconds slice) { return finished((info = transfer.wait(slice)).state); });
        return info;
    }
};

struct CalibratorObject {
    Handle<ta::Calibrator> handle;
    bool cuda;
    std::vector<int64_t> shape;  // of a map: [layers, kv_heads], or [heads of all layers] where layers differ

    // Numbers of a map as a NumPy array.
    template <class T>
    nb::object array(const std::vector<T>& numbers, const char* type) const {
        return package("numpy", "frombuffer")(nb::bytes(numbers.data(), numbers.size() * sizeof(T)), nb::str(type))
            .attr("reshape")(nb::tuple(nb::cast(shape)));
    }
};
