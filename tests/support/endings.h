// Cases of one fault, several at a time, and how they ended for the two sides of each.
#pragma once

#include <gtest/gtest.h>
#include <turboattention.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace ta::testing {

using Ending = std::pair<ta_status, ta_status>;

struct Endings {
    std::map<Ending, int> cases;

    // The cases of which a side ended so.
    int with(ta_status status) const {
        return count([&](const Ending& e) { return e.first == status || e.second == status; });
    }
    // Timing decides whether a side hears of a loss or waits until its deadline, and which side does.
    int lost() const {
        const auto is_loss = [](ta_status s) { return s == TA_E_PEER_LOST || s == TA_E_TIMEOUT; };
        return count([&](const Ending& e) { return is_loss(e.first) || is_loss(e.second); });
    }

  private:
    int count(auto is_counted) const {
        int n = 0;
        for (const auto& [ending, times] : cases) n += is_counted(ending) ? times : 0;
        return n;
    }
};

// Runs and prints. Most of a case is waiting, so that several run at once.
template <typename Case>
Endings run_all(const std::vector<Case>& cases, Ending (*run)(const Case&), const char* first, const char* second) {
    std::mutex mutex;
    Endings endings;
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([&] {
            for (size_t n; (n = next++) < cases.size();) {
                try {
                    const Ending ending = run(cases[n]);
                    const std::lock_guard lock(mutex);
                    ++endings.cases[ending];
                } catch (const std::exception& e) {
                    ADD_FAILURE() << cases[n].name() << ": " << e.what();
                }
            }
        });
    }
    for (std::thread& t : threads) t.join();
    for (const auto& [ending, n] : endings.cases)
        std::printf("%4d %s %s, %s %s\n", n, first, ta_status_name(ending.first), second, ta_status_name(ending.second));
    return endings;
}

}  // namespace ta::testing
