#include "tiering/share/group.h"

#include <algorithm>

#include "tiering/share/lane.h"

namespace ta::share {
namespace {

// Messages of a peer that overtook others, and bytes of them.
constexpr size_t kMostEarly = 4096;
constexpr uint64_t kMostEarlyBytes = uint64_t{64} << 20;

// Properties that ranks must agree on.
struct GroupShape {
    uint32_t ranks;
    uint32_t reserved;
};

Status lost(uint32_t rank, const char* how) {
    return fail(TA_E_PEER_LOST, "rank %u %s", rank, how).rank(int32_t(rank));
}

}  // namespace

Group::Group(std::shared_ptr<Context> context, const GroupSettings& settings, std::unique_ptr<Transport> transport)
    : context_(std::move(context)), settings_(settings), transport_(std::move(transport)), peers_(settings.ranks) {
    finished_.open();
}

Group::~Group() {
    stop();
}

Status Group::start(std::vector<Service*> services) {
    services_ = std::move(services);
    for (Peer& p : peers_) p.heard = created_;
    next_heartbeat_ = next_look_ = created_;
    const GroupShape shape{settings_.ranks, 0};
    for (uint32_t r = 0; r < settings_.ranks; ++r) {
        if (r != settings_.rank) send(r, MessageType::kHello, 0, PayloadWriter().put(shape).bytes());
    }
    if (settings_.ranks == 1) state_ = GroupState::kReady;
    transport_->when_stuck([this](const Status& why) { end(why); });
    return start_thread(thread_, [this] { run(); });
}

void Group::stop() {
    if (stopping_.exchange(true)) return;
    if (state() != GroupState::kEnded) tell_all(MessageType::kLeave, {});
    if (thread_.joinable()) {
        transport_->wake();
        thread_.join();
    } else {
        transport_->give_back_lent();
    }
    transport_->when_stuck({});
    transport_->end_writes();
}

GroupState Group::wait_connected(int64_t nanoseconds) const {
    std::unique_lock lock(state_mutex_);
    state_changed_.wait_until(lock, time_after(nanoseconds), [this] { return state() != GroupState::kConnecting; });
    return state();
}

Status Group::health() const {
    const std::lock_guard lock(state_mutex_);
    return why_.clone();
}

Status Group::check_ready() const {
    TA_RETURN_IF_ERROR(health());
    if (state() == GroupState::kReady) return {};
    return fail(TA_E_STATE, "the group is not ready: ta_group_poll belongs first").argument(0);
}

// `told`: the reason that peers get.
void Group::end(const Status& why, const Ending& told) {
    {
        const std::lock_guard lock(state_mutex_);
        if (state() == GroupState::kEnded) return;
        why_ = why.clone();
        state_.store(GroupState::kEnded, std::memory_order_release);
        state_changed_.notify_all();
        finished_.signal();
    }
    tell_all(MessageType::kEnded, {reinterpret_cast<const uint8_t*>(&told), sizeof told});
    transport_->end_writes();
    for (Service* s : services_) s->on_end(why);
}

void Group::tell_all(MessageType type, std::span<const uint8_t> payload) noexcept {
    try {
        const std::lock_guard lock(sending_);
        for (uint32_t r = 0; r < settings_.ranks; ++r) {
            if (r != settings_.rank) send_locked(r, type, 0, payload);
        }
    } catch (const std::bad_alloc&) {
        // The remaining peers are not told.
    }
}

void Group::send(uint32_t to, MessageType type, uint64_t channel, std::span<const uint8_t> payload) {
    const std::lock_guard lock(sending_);
    if (state() != GroupState::kEnded) send_locked(to, type, channel, payload);
}

void Group::send_locked(uint32_t to, MessageType type, uint64_t channel, std::span<const uint8_t> payload) {
    MessageHeader h{};
    h.type = uint16_t(type);
    h.generation = settings_.generation;
    h.from = settings_.rank;
    h.to = to;
    h.channel = channel;
    const bool heartbeat = type == MessageType::kAlive;
    h.number = peers_[to].sent + (heartbeat ? 0 : 1);
    transport_->send(to, pack(h, payload), heartbeat);
    peers_[to].sent = h.number;  // a message that could not be sent has no number
}

// ------------------------------------------------------------------------------------------------ communication thread

void Group::run() {
    while (!stopping_) {
        try {
            if (state() == GroupState::kEnded) {
                (void)transport_->receive(Time::max());
                continue;
            }
            const std::optional<Transport::Received> received = transport_->receive(next_time());
            Status s = received ? take_in(*received) : transport_->health();
            const Time now = Clock::now();
            if (s.ok()) s = check_peers(now, !received);
            if (!s.ok()) {
                end(s, heard_ending_ ? *heard_ending_ : Ending::of(s));
                continue;
            }
            send_heartbeats(now);
        } catch (const std::bad_alloc&) {
            end(fail(TA_E_MEMORY, "rank %u has no memory for the group's messages", settings_.rank)
                    .rank(int32_t(settings_.rank)));
        }
    }
}

Time Group::next_time() const {
    Time next = std::min(next_heartbeat_, next_look_);
    for (uint32_t r = 0; r < settings_.ranks; ++r) {
        const Peer& p = peers_[r];
        if (r == settings_.rank) continue;
        if (p.missing) next = std::min(next, p.missing_since + settings_.silence);
        if (p.greeted) next = std::min(next, p.heard + settings_.silence);
    }
    if (state() == GroupState::kConnecting) next = std::min(next, created_ + settings_.connect);
    for (Service* s : services_) next = std::min(next, s->on_time(Clock::now()));
    return next;
}

Status Group::take_in(const Transport::Received& received) {
    const uint32_t from = received.from;
    Result<Message> unpacked = unpack(received.packet, settings_.generation, from, settings_.rank);
    if (!unpacked.ok()) {
        Status s = std::move(unpacked).status();
        if (s.code() == TA_E_MISMATCH) return s;
        return fail(TA_E_PEER_LOST, "%s", s.detail() ? s.detail()->message : "a message was damaged").rank(int32_t(from));
    }
    Peer& peer = peers_[from];
    peer.heard = Clock::now();
    Message m = unpacked.take();
    const uint64_t number = m.header.number;
    peer.announced = std::max(peer.announced, number);
    if (MessageType(m.header.type) != MessageType::kAlive && number > peer.received) {
        const uint64_t bytes = m.payload.size();
        const bool is_next = number == peer.received + 1;
        if (!is_next && (peer.early.size() >= kMostEarly || peer.early_bytes + bytes > kMostEarlyBytes))
            return lost(from, "sent a message that got lost");
        if (peer.early.emplace(number, std::move(m)).second) peer.early_bytes += bytes;
    }
    while (!peer.early.empty() && peer.early.begin()->first == peer.received + 1) {
        const auto node = peer.early.extract(peer.early.begin());
        ++peer.received;
        peer.early_bytes -= node.mapped().payload.size();
        TA_RETURN_IF_ERROR(dispatch(from, node.mapped()));
        if (state() == GroupState::kEnded) return {};
    }
    const bool missing = peer.received < peer.announced;
    if (missing && !peer.missing) peer.missing_since = peer.heard;
    peer.missing = missing;
    return {};
}

Status Group::dispatch(uint32_t from, const Message& m) {
    Peer& peer = peers_[from];
    PayloadReader payload(m.payload);
    switch (MessageType(m.header.type)) {
        case MessageType::kHello: {
            GroupShape shape{};
            if (!payload.get(shape) || !payload.at_end() || peer.greeted) return no_message(from);
            if (shape.ranks != settings_.ranks) {
                return fail(TA_E_MISMATCH, "rank %u says that the group has %u ranks; here it has %u", from, shape.ranks,
                            settings_.ranks)
                    .rank(int32_t(from));
            }
            peer.greeted = true;
            send(from, MessageType::kWelcome, 0, {});
            break;
        }
        case MessageType::kWelcome:
            peer.welcomed = true;
            break;
        case MessageType::kLeave:
            return lost(from, "left the group");
        case MessageType::kEnded: {
            Ending ending{};
            if (!payload.get(ending) || !payload.at_end() || !ending.is_valid(settings_.ranks)) return no_message(from);
            heard_ending_ = ending.relayed(from);
            const Status s = ending.to_status(from);
            return fail(TA_E_PEER_LOST, "the group ended at %s", s.detail() ? s.detail()->message : "another rank")
                .rank(s.detail() ? s.detail()->rank : int32_t(from));
        }
        default: {
            const auto type = MessageType(m.header.type);
            const auto s = std::find_if(services_.begin(), services_.end(), [type](Service* x) { return x->takes(type); });
            return s == services_.end() ? no_message(from) : (*s)->on_message(m);
        }
    }
    const bool all = std::all_of(peers_.begin(), peers_.end(),
                                 [this](const Peer& p) { return &p == &peers_[settings_.rank] || (p.greeted && p.welcomed); });
    if (all && state() == GroupState::kConnecting) {
        const std::lock_guard lock(state_mutex_);
        if (state() == GroupState::kConnecting) {
            transport_->give_back_lent();
            state_.store(GroupState::kReady, std::memory_order_release);
        }
        state_changed_.notify_all();
        finished_.signal();
    }
    return {};
}

// `heard_all`: no message is waiting. While messages wait, only peers without waiting ones are judged, and only now and then:
// this rank may have been held up and not read what they sent. No peer is judged while a message of its own waits: it may have
// written its last words after this rank looked, and ended before this call.
Status Group::check_peers(Time now, bool heard_all) {
    if (state() == GroupState::kConnecting && now >= created_ + settings_.connect) return why_not_connected();
    const bool looks = now >= next_look_;
    if (!heard_all && !looks) return {};
    if (looks) next_look_ = now + heartbeat_interval();
    for (uint32_t r = 0; r < settings_.ranks; ++r) {
        const Peer& p = peers_[r];
        if (r == settings_.rank) continue;
        const bool gone = looks && !transport_->alive(r), silent = p.greeted && now >= p.heard + settings_.silence,
                   missing = p.missing && now >= p.missing_since + settings_.silence;
        if (!gone && !silent && !missing) continue;
        if (transport_->waits(r)) {  // asked after alive(): what the process wrote before its end is there
            if (gone) next_look_ = now;
            continue;
        }
        if (gone) return lost(r, "has ended: its process is gone");
        if (missing) return lost(r, "sent a message that got lost");
        return fail(TA_E_PEER_LOST, "nothing was heard from rank %u for %lld ms", r, (long long)settings_.silence.count())
            .rank(int32_t(r));
    }
    return {};
}

// Names a rank that has not joined, else one that does not answer. Names none if the transport cannot tell and there are
// several.
Status Group::why_not_connected() const {
    int32_t silent = -1;
    const auto time = (long long)settings_.connect.count();
    for (uint32_t r = 0; r < settings_.ranks; ++r) {
        const Peer& p = peers_[r];
        if (r == settings_.rank || (p.greeted && p.welcomed)) continue;
        const std::optional<bool> joined = p.greeted ? true : transport_->has_joined(r);
        if (joined == false) return fail(TA_E_TIMEOUT, "rank %u did not join within %lld ms", r, time).rank(int32_t(r));
        if ((joined || settings_.ranks == 2) && silent < 0) silent = int32_t(r);
    }
    if (silent < 0) return fail(TA_E_TIMEOUT, "not all ranks joined within %lld ms", time);
    return fail(TA_E_TIMEOUT, "rank %d did not answer within %lld ms", silent, time).rank(silent);
}

std::chrono::milliseconds Group::heartbeat_interval() const {
    return std::clamp(settings_.silence / 5, std::chrono::milliseconds(1), std::chrono::milliseconds(1000));
}

void Group::send_heartbeats(Time now) {
    if (now < next_heartbeat_) return;
    next_heartbeat_ = now + heartbeat_interval();
    for (uint32_t r = 0; r < settings_.ranks; ++r) {
        if (r != settings_.rank) send(r, MessageType::kAlive, 0, {});
    }
}

}  // namespace ta::share
