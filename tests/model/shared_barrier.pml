// SPDX-License-Identifier: Apache-2.0
// The exchange of src/comm/shared_barrier.cpp and slot_exchange.cpp as a model: check.py lets spin
// go through every order of the ranks' steps, with a fault between any two. An inline part has the
// name of the function that it stands for.
//
// Accesses to shared memory are one step where nothing can come between them that could not as well
// come before or behind: most ask only for what never ceases to be true (who has arrived, who is
// dead, that `state` has changed). A slot is torn from the moment when it may be written until its
// rank arrives, and may be read until the reader's next step. A rank that is stopped for a while is
// one whose next step comes late.
//
// -D RANKS, BARRIERS_IN_ALL (of a few exchanges, see init); FAULTS: at most how many deaths, stops and
// interrupts. FUTEX: sleep() as it is, and nothing else that ends it. Without FUTEX a rank sleeps
// until a look would find something, since a look that finds nothing changes nothing.
// Other names: a defect (check.py).

#define NOBODY 0
#define TORN 0  // a slot or reason that is being written
#define WHOLE 1

#ifdef ONE_SLOT
#define PARITY(barrier) 0
#else
#define PARITY(barrier) ((barrier) & 1)
#endif

#if RANKS == 3
#define ALL(of) (of(0) && of(1) && of(2))
#define ANY(of) (of(0) || of(1) || of(2))
#else
#define ALL(of) (of(0) && of(1))
#define ANY(of) (of(0) || of(1))
#endif

// SharedBarrier::Control; the breaker is its rank + 1.
#define pack(met, breaker) ((met) << 3 | (breaker))
#define met_of(state) ((state) >> 3)
#define breaker_of(state) ((state) & 7)
byte state;
#ifdef FUTEX
byte bell, sleepers;
bool asleep[RANKS];
#endif

// RankArea and slots. A slot holds the number of the barrier that it was filled for, a message also
// the shape of the exchange, and where what the slot holds ends.
byte arrived[RANKS];
byte message[2 * RANKS], slot[2 * RANKS], stripe[2 * RANKS];
bit reason[RANKS];
#define OF(rank, barrier) (2 * (rank) + PARITY(barrier))
#define CAME(r) (arrived[r] >= number)
#define SLOT(r) (slot[OF(r, number)] == number)
#define STRIPE(r) (stripe[OF(r, number)] == number)
#define SAID(r) (message[OF(r, number)] >> 4 == number)
#define SAME(r) ((message[OF(r, number)] & 3) == shape)
#define END(r) (message[OF(r, number)] >> 2 & 3)

// Shapes of exchanges: one part, two parts that ranks publish together or one after the other, one
// part of which each rank sums a stripe.
#define ONE 1
#define TWO 2
#define STRIPED 3
#define LENGTH (shape == TWO -> 2 : 1)
#define MOST 4
byte plan[MOST];
byte odd = RANKS;  // the rank that begins with another shape than the others, if any

// Faults. A death is seen by pidfd, an interrupt between slices of a wait.
bool dead[RANKS], stopped[RANKS], interrupted[RANKS];
bool limited;  // the time limit may pass at any moment of a wait; otherwise it never does
byte faults_left = FAULTS;
bool over[RANKS];  // nothing follows on this rank
#define GONE(r) (dead[r] && !CAME(r))
#define WOULD_FIND \
  (state != pack(number - 1, NOBODY) || ALL(CAME) || ANY(GONE) || interrupted[me] || FIRST_LOOK)
#ifdef ONLY_ARRIVING_RANKS_MEET
#define FIRST_LOOK (rounds == 0)
#else
#define FIRST_LOOK false
#endif

// How an exchange ended, on the first rank that ended it.
#define SUCCEEDED 1
#define DIVERGED 2
#define BROKEN 3
byte outcome[MOST];

#ifdef WAITS_AFTER_THE_LAST_BARRIER
byte has_read[RANKS];
#define HAS_READ(r) (has_read[r] >= number)
#endif

inline ends(how) {
  assert(outcome[exchange] == 0 || outcome[exchange] == how);  // alike on all ranks
  outcome[exchange] = how;
  exchange++;
  brought = 0;
  striped = false
}

inline set_state(after) {
  assert(breaker_of(state) == NOBODY);  // a broken group stays broken
  assert(met_of(after) >= met_of(state));
  state = after;
  rings = true
}

inline check_usable() {
  if
  :: breaker_of(state) != NOBODY -> at = THROW_BROKEN
  :: else
  fi
}

// Of the next barrier: the slot, sum_stripe and the message.
inline fill(value, message_value) {
  message[OF(me, number + 1)] = message_value;
  if
  :: brought < LENGTH -> slot[OF(me, number + 1)] = value
  :: else
  fi;
  if
  :: striped -> stripe[OF(me, number + 1)] = value
  :: else
  fi
}

// What of it is published.
inline publish() {
  if
  :: bring = LENGTH
  :: brought + 1 < LENGTH -> bring = brought + 1
  fi
}

inline arrive() {
  number++;
  arrived[me] = number;
  late = false;
  rounds = 0
}

inline try_meet() {
  if
#ifdef ONLY_ARRIVING_RANKS_MEET
  :: rounds > 0
#endif
#ifdef STATE_WITHOUT_COMPARING
  :: ALL(CAME) && state == pack(number - 1, NOBODY) -> at = SET_STATE
#else
  :: ALL(CAME) && state == pack(number - 1, NOBODY) -> set_state(pack(number, NOBODY))
#endif
  :: else
  fi
}

inline met() {
#ifndef ARRIVALS_DECIDE
  assert(met_of(state) == number || met_of(state) + 1 == number);  // else it was overwritten
#endif
  if
#ifdef BROKEN_BEFORE_MET
  :: breaker_of(state) != NOBODY -> at = THROW_BROKEN
#endif
#ifdef ARRIVALS_DECIDE
  :: ALL(CAME) -> at = ADVANCE
#endif
  :: met_of(state) == number -> at = ADVANCE
  :: else -> check_usable()
  fi
}

inline look_at_peers() {
  if
#ifdef DEATHS_UNSEEN
  :: false
#else
  :: ANY(GONE) -> last = number - 1; at = BREAK_AT
#endif
  :: else
  fi
}

inline look_at_clock() {
  if
#ifdef CLOCK_UNSEEN
  :: false
#else
  :: late && !ALL(CAME) -> last = number - 1; at = BREAK_AT
#endif
  :: else
  fi
}

// The first half: `at` becomes its second half, in which the exchange by comparison comes.
inline break_at() {
  if
  :: at == BREAK_AT -> reason[me] = TORN
  :: else
  fi
}

// What advance() reads after this barrier is whole for as long as it may read.
inline check_slots() {
  assert(brought == LENGTH || ALL(SLOT));
  assert(!striped || ALL(STRIPE));
  assert(ALL(SAID))
}

// As common_end(): what all ranks have brought.
inline take_common_end() {
#ifdef OWN_END
  bring = END(me);
#else
  bring = (END(0) < END(1) -> END(0) : END(1));
#if RANKS == 3
  bring = (bring < END(2) -> bring : END(2));
#endif
#endif
  striped = shape == STRIPED && bring > brought;
  brought = bring;
  bring = 0
}

// In FUTEX, after a change of `state`.
#ifdef FUTEX
#define NOW_RINGS rings
#define AND_RING if :: rings -> rings = false; at = RING :: else fi
#else
#define NOW_RINGS false
#define AND_RING rings = false
#endif

// abandon() of a broken group
#ifdef REASON_WRITTEN_AGAIN
#define leave() reason[me] = TORN; at = REASON
#else
#define leave() goto gone
#endif

#define AT(place) (at == place && !dead[me] && !stopped[me])
mtype = { BEGIN, FILL, LATE_FILL, WAIT, SLEEP, SET_STATE, BREAK_AT, REASON, RING, WAKE, BELL, FUTEX_WAIT,
          ASLEEP, ADVANCE, READ, THROW_BROKEN, ABANDON, OVER };

proctype rank(byte me) {
  mtype at = BEGIN;
  byte exchange, number, shape, brought, bring, last, rounds;
  bool striped, late, pending, leaving, rings;

  do
  :: d_step { AT(BEGIN) ->
       shape = plan[exchange];
       if
       :: me == odd && exchange == 0 -> shape = 1 + shape % 3
       :: else
       fi;
       if
       :: shape == 0 || interrupted[me] -> at = ABANDON  // it is closed or given up
       :: else -> at = FILL; check_usable()
       fi;
       if
       :: at == FILL -> fill(TORN, TORN)
       :: else
       fi
     }

  :: d_step { AT(FILL) && interrupted[me] -> at = ABANDON }  // or what it computes fails
  :: atomic { AT(FILL) ->
       publish();
#ifdef ARRIVES_BEFORE_IT_FILLS
       at = LATE_FILL;
#else
       fill(number + 1, (number + 1) << 4 | bring << 2 | shape);
       bring = 0;
       at = WAIT;
#endif
       arrive()
     }
  :: d_step { AT(LATE_FILL) ->
       number--;
       fill(number + 1, (number + 1) << 4 | bring << 2 | shape);
       bring = 0;
       number++;
       at = WAIT
     }

  // arrive() and wait() go on here.
#ifndef FUTEX
  :: d_step { AT(WAIT) && limited && !late -> late = true }
  :: d_step { AT(WAIT) && (WOULD_FIND || late) ->
#else
  :: d_step { AT(WAIT) ->
#endif
       try_meet();
       if
       :: at == WAIT && !NOW_RINGS -> met()
       :: else
       fi;
       if
       :: at == WAIT && !NOW_RINGS ->
         rounds++;
         assert(rounds <= 2);  // a look that finds something ends the wait, and so does the limit
         pending = interrupted[me];  // the slice is over
         look_at_peers();
         if
         :: at == WAIT -> look_at_clock()
         :: else
         fi;
         break_at();
         if
#ifdef SILENT_INTERRUPT
         :: at == WAIT && pending -> at = OVER
#endif
         :: at == WAIT && pending -> at = ABANDON
#ifdef FUTEX
         :: at == WAIT && !pending -> at = SLEEP
#endif
         :: else
         fi
       :: else
       fi;
       AND_RING
     }
  :: d_step { AT(SET_STATE) -> set_state(pack(number, NOBODY)); rings = false; at = WAIT }

#ifdef FUTEX
  :: d_step { AT(SLEEP) -> sleepers++; at = BELL }
#ifdef BELL_AFTER_STATE
  :: d_step { AT(BELL) -> at = (state == pack(number - 1, NOBODY) -> FUTEX_WAIT : ASLEEP) }
  :: d_step { AT(FUTEX_WAIT) -> asleep[me] = true; at = ASLEEP }
#else
  :: d_step { AT(BELL) -> last = bell; at = READ }
  :: d_step { AT(READ) -> at = (state == pack(number - 1, NOBODY) -> FUTEX_WAIT : ASLEEP) }
  :: d_step { AT(FUTEX_WAIT) -> asleep[me] = (last == bell); at = ASLEEP }
#endif
  :: d_step { AT(ASLEEP) && (!asleep[me] || interrupted[me]) ->
       asleep[me] = false;
       sleepers--;
       last = 0;
       rounds = 0;
       at = WAIT
     }
  :: d_step { AT(RING) -> bell++; at = WAKE }
  :: d_step { AT(WAKE) ->
       if
       :: sleepers > 0 ->
         asleep[0] = false;
         asleep[RANKS - 1] = false;
         asleep[RANKS - 2] = false
       :: else
       fi;
       at = (leaving -> ABANDON : WAIT)
     }
#endif

  :: d_step { AT(BREAK_AT) ->
       if
       :: state == pack(last, NOBODY) -> set_state(pack(last, me + 1))
       :: else
       fi;
       last = 0;
#ifdef REASON_AFTER_STATE
       at = REASON;
       rings = false
     }
  :: d_step { AT(REASON) ->
#endif
       reason[me] = WHOLE;
       at = (leaving -> ABANDON : WAIT);
       AND_RING
     }

  :: d_step { AT(ADVANCE) ->
       check_slots();
       late = false;
       pending = false;
       rounds = 0;
       if
       :: !ALL(SAME) -> ends(DIVERGED); at = BEGIN
       :: else ->
         take_common_end();
         if
         :: brought < LENGTH || striped -> fill(TORN, TORN); at = FILL
         :: else ->
#ifdef WAITS_AFTER_THE_LAST_BARRIER
           has_read[me] = number;
           at = READ
#else
           ends(SUCCEEDED);
           at = BEGIN
#endif
         fi
       fi
     }
#ifdef WAITS_AFTER_THE_LAST_BARRIER
  :: d_step { AT(READ) && ALL(HAS_READ) -> ends(SUCCEEDED); at = BEGIN }
#endif

  :: atomic { AT(THROW_BROKEN) ->
       assert(faults_left < FAULTS || limited);  // nothing fails without a cause
       assert(reason[breaker_of(state) - 1] == WHOLE);
       ends(BROKEN);
       leave()
     }
  // By the caller or by ~SharedMemoryGroup.
  :: d_step { AT(ABANDON) && breaker_of(state) == NOBODY ->
       leaving = true;
       last = met_of(state);
       at = BREAK_AT;
       break_at()
     }
  :: atomic { AT(ABANDON) && breaker_of(state) != NOBODY -> leave() }
#ifdef REASON_WRITTEN_AGAIN
  :: atomic { AT(REASON) -> reason[me] = WHOLE; goto gone }
#endif
  :: atomic { at == OVER || dead[me] || stopped[me] -> goto gone }
  od;

gone:
  atomic {
    over[me] = true;
    // Leaves no traces that would tell equal states apart.
    exchange = 0; number = 0; shape = 0; brought = 0; bring = 0; last = 0; rounds = 0;
    striped = false; late = false; pending = false; leaving = false; rings = false; at = OVER
  };
end:
  false
}

#ifdef FUTEX
#define MAY_BE(victim) (!interrupted[victim])
#else
#define MAY_BE(victim) (!dead[victim] && !stopped[victim])
#endif

// The ranks are alike, so the first fault hits rank 0 and the second one that or rank 1.
inline fault(victim) {
  atomic {
    faults_left > 0 && faults_left + victim <= FAULTS && !over[victim] && MAY_BE(victim) ->
    if
#ifndef FUTEX
    :: dead[victim] = true
    :: limited -> stopped[victim] = true
#endif
    :: !interrupted[victim] -> interrupted[victim] = true
    fi;
    faults_left--
  }
}

active proctype faults() {
end:
  do
  :: fault(0)
  :: fault(1)
  od
}

init {
  byte i;
  atomic {
#ifndef FUTEX
    if
    :: limited = true
    :: true
    fi;
#endif
    if
#if BARRIERS_IN_ALL == 2
    :: plan[0] = STRIPED
    :: plan[0] = TWO
#elif BARRIERS_IN_ALL == 3
    :: plan[0] = STRIPED; plan[1] = ONE
    :: plan[0] = TWO; plan[1] = ONE
    :: plan[0] = ONE; plan[1] = ONE; odd = 0  // DivergenceError, and the group can be used further
#else
    :: plan[0] = STRIPED; plan[1] = TWO
    :: plan[0] = TWO; plan[1] = STRIPED; plan[2] = ONE
    :: plan[0] = STRIPED; plan[1] = ONE; plan[2] = ONE; odd = 0
    :: plan[0] = TWO; plan[1] = ONE; odd = 1
#endif
    fi;
    do
    :: i < RANKS -> run rank(i); i++
    :: else -> break
    od
  }
}
