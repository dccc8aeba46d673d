// SPDX-License-Identifier: Apache-2.0
// The order of a simulated accelerator's work: streams, marks, a seeded choice of what runs next.
// Knows nothing of torch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace simulator {

constexpr int kMaxDevices = 8;

struct Stream;

// A point in the order of a stream. It is reached when the work before it has run.
struct Mark {
  explicit Mark(Stream* at) : stream(at) {}
  Stream* const stream;
  bool reached = false;  // guarded by the world's mutex
  double time = 0;       // of the virtual clock, when it was reached
};
using MarkPtr = std::shared_ptr<Mark>;

struct Place {
  int device = 0;
  int64_t stream = 0;
};

struct Work {
  std::function<void()> run;      // empty: only an order
  std::vector<Place> after_them;  // streams: runs after all that they had when it was started
  std::vector<MarkPtr> after;     // runs when all of these are reached
  MarkPtr mark;                   // reached when it has run; set when it is started
  size_t copied = 0;              // bytes that it copies to or from the host, in a driver's call
};

struct Stream {
  std::deque<std::shared_ptr<Work>> queue;
  MarkPtr tail;         // of the last work that was put on it
  double weight = 1.0;  // how likely it goes on where others could, too
  double time = 0;      // of the virtual clock: when it has done what has run
};

// How long work takes by a virtual clock, in seconds. The host takes no time.
struct Clock {
  double kernel = 0;  // whatever is no copy by the driver
  double byte = 0;    // of those copies; each stream copies at this rate
};

struct Settings {
  uint64_t seed = 0;
  int devices = 1;
  bool lazy = false;            // work is only recorded until mark_step
  bool unpinned_waits = false;  // copies of unpinned host memory are never asynchronous
  size_t memory = 0;            // bytes of each device
};

// One kind of accelerator: its devices, their streams, and what they have to do.
//
// Any thread may call anything. One piece of work runs at a time, in whichever thread waits,
// ticks, or in the background thread; the mutex is not held then. No call that takes the mutex
// runs foreign code under it, so it may be taken with or without Python's global lock.
class World {
 public:
  explicit World(std::string name) : name_(std::move(name)) {}

  void open(const Settings& settings);
  void close();
  void reseed(uint64_t seed);
  bool is_open() const { return open_; }
  void require_open() const;
  const Settings& settings() const { return settings_; }
  const std::string& name() const { return name_; }
  uint64_t session() const { return session_; }  // counts the calls of open

  // This thread's choice, as with any accelerator.
  int device();
  void set_device(int device);  // does nothing if it is the thread's already, as torch's

  // CUDA's contexts. Calls of the runtime make one on the device they go to; the driver's calls fail
  // in a thread that has none. A thread gets one when it allocates memory, or a device is set that
  // was not its own before.
  void touch(int device) { contexts_ |= 1u << device; }
  void give_context(int device);
  void switch_device(int device);  // as torch's guards: makes no context where there is none
  bool has_context();
  uint32_t contexts() const { return contexts_; }  // a bit for each device that has one

  // This thread's mode towards captures, and the last error of its calls of the runtime.
  int& capture_mode();
  int& pending_error();
  int64_t stream(int device);
  void set_stream(Place place);
  int64_t new_stream(int device);
  Place current() { return {device(), stream(device())}; }

  void submit(Place place, std::function<void()> run, std::vector<Place> after_them = {},
              size_t copied = 0);
  std::vector<size_t> shuffled(size_t count);  // 0 to count - 1 in an order that the seed chooses
  void mark_step();

  MarkPtr tail(Place place);                      // null: there is nothing to wait for
  void wait(Place place, const MarkPtr& mark);    // the stream waits, this thread does not
  bool query(const MarkPtr& mark);                // and makes a little progress

  // Block this thread. Throw what asynchronous work failed with.
  void synchronize(const MarkPtr& mark);
  void synchronize_device(int device);

  bool tick();                 // run one piece of work; false: there is none that may run
  void drain();                // flush what is recorded and run everything
  double clock(const Clock& clock);  // start the virtual clock anew; the time that it showed
  void background(bool on);
  size_t pending();            // pieces of work that have not run, with those only recorded
  size_t recorded();

  // `allocated` of a device counts what torch holds, not what late work keeps alive.
  bool allocate(int device, size_t size);
  void release(int device, size_t size);
  size_t allocated(int device) const { return allocated_[device]; }
  size_t peak(int device) const { return peak_[device]; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Recorded {
    Place place;
    std::shared_ptr<Work> work;
  };

  Stream& at(Place place);
  void put(Place place, std::shared_ptr<Work> work);
  void flush();
  static bool may_run(const Stream& stream);
  Stream* choose();
  static Stream* needed(const MarkPtr& mark);
  void run(Lock& lock, Stream& stream);
  void run_until(Lock& lock, const MarkPtr& mark);
  void throw_error(Lock& lock);
  double uniform() { return std::uniform_real_distribution<>()(random_); }
  double weight();

  const std::string name_;
  std::atomic<bool> open_ = false;
  std::atomic<uint64_t> session_ = 0;
  Settings settings_;
  std::atomic<uint32_t> contexts_ = 0;
  std::atomic<size_t> allocated_[kMaxDevices] = {};
  std::atomic<size_t> peak_[kMaxDevices] = {};

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::vector<std::map<int64_t, std::unique_ptr<Stream>>> streams_;  // of each device, by id
  std::vector<Recorded> recorded_;
  int64_t next_stream_ = 1;
  bool busy_ = false;  // a piece of work runs
  Clock clock_;
  std::string error_;  // the first that work failed with and nobody has been told of
  std::thread background_;
  bool stop_background_ = false;
};

}  // namespace simulator
